"""Layers whose weights lie elsewhere and come, one layer after the other, to where they are multiplied."""
