"""Linears of the CPU."""
