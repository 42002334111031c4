"""Layers with weights in host memory or on disk."""
