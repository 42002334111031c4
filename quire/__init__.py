"""Quire's public face: `from quire import LLM, SamplingParams`. Importing it is cheap; a name loads when first used."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engine.llm import LLM
    from quire.engine.text.grammar import choice_grammar, json_grammar
    from quire.engine.types import Grammar, SamplingParams

__all__ = ["LLM", "Grammar", "SamplingParams", "choice_grammar", "json_grammar"]

_HOMES = {
    "LLM": "quire.engine.llm",
    "Grammar": "quire.engine.types",
    "SamplingParams": "quire.engine.types",
    "choice_grammar": "quire.engine.text.grammar",
    "json_grammar": "quire.engine.text.grammar",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return metadata.version("quire")
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
