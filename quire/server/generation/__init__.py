"""Runs resolved requests through the engine, and turns its outputs into the bytes of answers."""
