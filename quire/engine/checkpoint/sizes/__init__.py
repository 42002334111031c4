"""Model sizes."""
