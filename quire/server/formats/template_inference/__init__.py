"""Infers from a chat template's renderings how a model writes tool calls, reasoning and content."""
