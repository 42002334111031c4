"""Programs that measure what is kept in --data-dir."""
