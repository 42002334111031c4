"""Transforms JSON schemas before grammars are made of them."""
