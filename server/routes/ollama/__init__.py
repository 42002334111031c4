"""Ollama's API, for tools that know no other."""
