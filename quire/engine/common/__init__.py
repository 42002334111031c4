"""Shared by both halves of the engine."""
