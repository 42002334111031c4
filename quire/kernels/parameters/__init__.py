"""Architecture specs share these. Never imports torch."""
