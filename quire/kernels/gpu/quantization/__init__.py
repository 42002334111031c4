"""Weights in few bits on a GPU: how they are packed, and Triton products of them."""
