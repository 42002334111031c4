"""Vision specs and image fields of a model's files."""
