"""Memory and speed plans from config.json and machine data."""
