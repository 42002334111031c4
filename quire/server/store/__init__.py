"""Storage in --data-dir."""
