"""Types and bounds of config.json's fields."""
