"""Images of requests."""
