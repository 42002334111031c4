"""What reads a field of a spec from config.json: the values of tables of families that are not the same for all models.

A value is either the field's own or a reader, a function of the config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError

Read = Callable[[ModelConfig], Any]
Fields = Mapping[str, Any]
"""By name, values or readers; a list or tuple has a value for each layer."""


def read_all(fields: Fields, config: ModelConfig) -> dict[str, Any]:
    return {name: value(config) if callable(value) else value for name, value in fields.items()}


def flag(name: str) -> Read:
    """Whether config.json says so."""
    return lambda config: bool(config.raw.get(name))


def unless(name: str) -> Read:
    """True, unless config.json says no."""
    return lambda config: config.raw.get(name) is not False


def given(name: str, otherwise: Any = None) -> Read:
    """What config.json says; `otherwise` where it says nothing, or 0."""
    return lambda config: config.raw.get(name) or otherwise


def biased(name: str) -> Fields:
    """Attention's linears have biases if config.json says so by this name."""
    return {"qkv_bias": flag(name), "out_bias": flag(name)}


def sizes(config: ModelConfig, names: Sequence[str], what: str) -> list[int]:
    """Integers that config.json must have, the sizes of `what`. Raises ModelError."""
    found = [config.raw.get(name) for name in names]
    for name, size in zip(names, found, strict=True):
        if not isinstance(size, int):
            raise ModelError(f"model: config.json of a {config.model_type!r} lacks {name}, the size of a {what}")
    return [size for size in found if isinstance(size, int)]
