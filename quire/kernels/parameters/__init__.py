"""Shared with architecture specs. No torch."""
