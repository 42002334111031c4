"""Bidirectional attention for images."""
