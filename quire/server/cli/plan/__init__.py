"""What fits where, and how fast it can be: counted, from config.json and what is known of a machine."""
