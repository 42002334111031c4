"""Linears of a GPU: of dense weights, with adapters, and which kernel multiplies which weight."""
