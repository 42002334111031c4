"""Ollama's API, for tools that support no other."""
