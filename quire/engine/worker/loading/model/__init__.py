"""What loading a model is made of."""
