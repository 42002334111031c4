"""Attention as the reference computes it, and what of it ranks that divide tokens need."""
