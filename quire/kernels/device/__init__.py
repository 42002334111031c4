"""What is the same for every kind of accelerator: what its libraries raise, in words that help."""
