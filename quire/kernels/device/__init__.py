"""Code for every kind of accelerator."""
