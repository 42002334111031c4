"""MLA in plain PyTorch."""
