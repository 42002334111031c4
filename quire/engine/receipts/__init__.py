"""Receipts record everything that decided an answer's tokens, for a replay."""
