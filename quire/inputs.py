"""vLLM's module of this name."""

from quire.engine.offline.model import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
