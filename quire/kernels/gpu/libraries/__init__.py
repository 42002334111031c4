"""Attention by libraries."""
