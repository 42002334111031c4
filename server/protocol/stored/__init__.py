"""Bodies of what is kept in --data-dir."""
