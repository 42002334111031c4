"""Conversations, files and batches of --data-dir."""
