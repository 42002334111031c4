"""For every accelerator."""
