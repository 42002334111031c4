"""Finds out from a chat template's own rendering how a model writes tool calls, reasoning and content."""
