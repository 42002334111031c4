"""Exports the types of prompts from a module with vLLM's name, so that programs written for vLLM can import them."""

from quire.engine.offline.offline_model import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
