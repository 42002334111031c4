"""Quantized weights on a GPU."""
