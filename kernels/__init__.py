"""Tensors in, tensors out. This package knows no request; importing it is free (no torch, no compiled code)."""
