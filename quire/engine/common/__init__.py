"""Structs, errors, configuration and clock shared by both halves of the engine."""
