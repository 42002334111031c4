"""Encoders and towers for images as modules, of every spec."""
