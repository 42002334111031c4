"""Trials that a GPU's kernels must pass before they serve."""
