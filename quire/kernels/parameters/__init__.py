"""Shared with architecture specs; never imports torch."""
