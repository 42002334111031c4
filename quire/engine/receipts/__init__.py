"""Receipts: all that decided an answer's tokens, and whether the same comes of it again."""
