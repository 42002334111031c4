from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.engine.common.errors import ModelError
from quire.engine.families.base.model_config import ModelConfig
from quire.engine.families.base.schema.config_objects import MAX_WIDTH

POST_NORMS: Mapping[str, Any] = {"input_norm": False, "output_norm": True}
ConfigReader = Callable[[ModelConfig], Any]
SpecFields = Mapping[str, Any]
"""A callable gets the config and returns the value. A list or tuple has one value per layer."""


def read_fields(fields: SpecFields, config: ModelConfig) -> dict[str, Any]:
    return {name: value(config) if callable(value) else value for name, value in fields.items()}


def flag_reader(name: str) -> ConfigReader:
    return lambda config: bool(config.raw.get(name))


def default_true_reader(name: str) -> ConfigReader:
    return lambda config: config.raw.get(name) is not False


def field_reader(name: str, default: Any = None) -> ConfigReader:
    """A missing field, null and 0 become `default`."""
    return lambda config: config.raw.get(name) or default


def max_position(config: ModelConfig) -> int:
    return config.max_position


def has_untied_head(config: ModelConfig) -> bool:
    return not config.tie_embeddings


def attention_bias_readers(name: str) -> SpecFields:
    return {"qkv_bias": flag_reader(name), "out_bias": flag_reader(name)}


def read_required_sizes(config: ModelConfig, names: Sequence[str], description: str) -> list[int]:
    """Raises ModelError unless all fields are integers."""
    values = [config.raw.get(name) for name in names]
    for name, size in zip(names, values, strict=True):
        if not isinstance(size, int):
            raise ModelError(f"model: config.json of a {config.model_type!r} lacks {name}, the size of a {description}")
    return [size for size in values if isinstance(size, int)]


def fill_intermediate_size(fields: dict[str, Any]) -> None:
    hidden = fields.get("hidden_size")
    if fields.get("intermediate_size") is None and isinstance(hidden, int) and 1 <= hidden <= MAX_WIDTH:
        expansion_ratio = fields.get("expansion_ratio")
        expansion_ratio = 4 if expansion_ratio is None else expansion_ratio
        is_ratio = isinstance(expansion_ratio, int | float) and 0 < expansion_ratio < 1e6
        fields["intermediate_size"] = int(expansion_ratio * hidden) if is_ratio else None


def set_multi_query_kv_heads(fields: dict[str, Any]) -> None:
    """new_decoder_architecture overrides multi_query."""
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        fields["num_key_value_heads"] = 1
