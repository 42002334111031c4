"""Sublayers that do more to the residual stream than add to it."""
