"""Collectives of GPUs in Triton."""
