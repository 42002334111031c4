"""Sublayers that do more with the residual stream than add to it."""
