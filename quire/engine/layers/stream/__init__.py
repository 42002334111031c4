"""Sublayers that change the residual stream other than by adding to it (Gemma 4, Zamba 2)."""
