"""Quire's public names: `from quire import LLM, SamplingParams`. Importing the package is cheap, because names load
when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine.common.request_params import Grammar, PoolingParams, ThinkingBudget
    from quire.engine.lora.local_adapters import LoRARequest
    from quire.engine.offline.async_llm import AsyncLLM
    from quire.engine.offline.llm import LLM
    from quire.engine.offline.llm_engine import LLMEngine
    from quire.engine.offline.offline_model import PromptType, TextPrompt, TokensPrompt
    from quire.engine.offline.outputs import CompletionOutput, Logprob, RequestOutput
    from quire.engine.offline.params import (
        BeamSearchParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from quire.engine.offline.scoring import Forward, score
    from quire.engine.text.grammar_compiler import choice_grammar, json_grammar
    from quire.server.cli.engine_args import EngineArgs

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "Forward",
    "Grammar",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "ThinkingBudget",
    "TokensPrompt",
    "choice_grammar",
    "json_grammar",
    "score",
]

_MODULES = {
    "quire.engine.lora.local_adapters": ("LoRARequest",),
    "quire.engine.offline.async_llm": ("AsyncLLM",),
    "quire.engine.offline.llm": ("LLM",),
    "quire.engine.offline.llm_engine": ("LLMEngine",),
    "quire.engine.offline.offline_model": ("PromptType", "TextPrompt", "TokensPrompt"),
    "quire.engine.offline.outputs": ("CompletionOutput", "Logprob", "RequestOutput"),
    "quire.engine.offline.params": (
        "BeamSearchParams",
        "RequestOutputKind",
        "SamplingParams",
        "StructuredOutputsParams",
    ),
    "quire.engine.offline.scoring": ("Forward", "score"),
    "quire.engine.text.grammar_compiler": ("choice_grammar", "json_grammar"),
    "quire.engine.common.request_params": ("Grammar", "PoolingParams", "ThinkingBudget"),
    "quire.server.cli.engine_args": ("EngineArgs",),
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("quire.engine").VERSION
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
