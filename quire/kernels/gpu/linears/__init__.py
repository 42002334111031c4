"""Linears of a GPU."""
