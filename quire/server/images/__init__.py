"""The images of requests: where they come from, and their bytes."""
