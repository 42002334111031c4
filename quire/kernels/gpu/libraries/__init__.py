"""Attention by flash-attn 2, 3, 4 and PyTorch."""
