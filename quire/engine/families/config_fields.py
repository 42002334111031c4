"""What reads a field of a spec from config.json: the values of tables of families that are not the same for all models.

A value is either the field's own or a reader, a function of the config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError

ConfigReader = Callable[[ModelConfig], Any]
SpecFields = Mapping[str, Any]
"""By name, values or readers; a list or tuple has a value for each layer."""


def read_fields(fields: SpecFields, config: ModelConfig) -> dict[str, Any]:
    return {name: value(config) if callable(value) else value for name, value in fields.items()}


def flag_reader(name: str) -> ConfigReader:
    """Whether config.json says so."""
    return lambda config: bool(config.raw.get(name))


def default_true_reader(name: str) -> ConfigReader:
    """True, unless config.json says no."""
    return lambda config: config.raw.get(name) is not False


def field_reader(name: str, default: Any = None) -> ConfigReader:
    """What config.json says; `default` where it says nothing, or 0."""
    return lambda config: config.raw.get(name) or default


def attention_bias_readers(name: str) -> SpecFields:
    """Attention's linears have biases if config.json says so by this name."""
    return {"qkv_bias": flag_reader(name), "out_bias": flag_reader(name)}


def read_required_sizes(config: ModelConfig, names: Sequence[str], description: str) -> list[int]:
    """Integers that config.json must have, the sizes of `description`. Raises ModelError."""
    values = [config.raw.get(name) for name in names]
    for name, size in zip(names, values, strict=True):
        if not isinstance(size, int):
            raise ModelError(f"model: config.json of a {config.model_type!r} lacks {name}, the size of a {description}")
    return [size for size in values if isinstance(size, int)]
