"""Vision towers and projectors."""
