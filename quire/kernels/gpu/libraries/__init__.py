"""Attention by the kernels of others: flash-attn 2, 3 and 4, and what PyTorch has."""
