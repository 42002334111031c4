"""Kernel parameters other than tensors, shared with architecture specs. No torch."""
