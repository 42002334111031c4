"""vLLM's module of this name."""

from quire.engine.offline.offline_model import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
