"""Settings from flags or arguments, environment variables and TOML files."""
