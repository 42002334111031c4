"""Receipts, which record everything that decided an answer's tokens, so that it can be replayed."""
