"""What fits where and how fast it can be, from config.json and known machine data."""
