"""Embeddings, scores, rankings and labels."""
