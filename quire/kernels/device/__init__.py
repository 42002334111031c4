"""Code for every accelerator."""
