"""Images in requests."""
