"""Compiles Triton kernel variants before the first step."""
