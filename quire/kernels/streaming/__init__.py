"""Weights in host memory or on disk."""
