"""Reads settings: from flags or arguments, variables, TOML files."""
