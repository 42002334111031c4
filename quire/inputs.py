"""Has the name of vLLM's module."""

from quire.engine.offline.offline_model import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
