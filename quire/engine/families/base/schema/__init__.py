"""What is read of config.json: every field, its type and its bounds."""
