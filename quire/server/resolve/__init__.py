"""Turns pydantic bodies into GenerationRequests. Every InvalidRequest names its parameter."""
