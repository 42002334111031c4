"""Parts of model loading."""
