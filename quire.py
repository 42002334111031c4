"""Quire's public face: `from quire import LLM, SamplingParams`. Importing it is cheap; a name loads when first used."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.grammar import choice_grammar, json_grammar
    from engine.llm import LLM
    from engine.types import Grammar, SamplingParams

__all__ = ["LLM", "Grammar", "SamplingParams", "choice_grammar", "json_grammar"]

_HOMES = {
    "LLM": "engine.llm",
    "Grammar": "engine.types",
    "SamplingParams": "engine.types",
    "choice_grammar": "engine.grammar",
    "json_grammar": "engine.grammar",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return metadata.version("quire")
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
