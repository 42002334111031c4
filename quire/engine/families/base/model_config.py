from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.engine.families.base.schema.config_schema import FamilyConfigFields


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Common fields of config.json, under Llama's names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    tie_embeddings: bool
    dtype: str
    rope: dict[str, Any]
    raw: FamilyConfigFields
    """Values have their declared types, or are None."""
    eos_token_ids: tuple[int, ...] = ()
    """Empty until read_eos_token_ids is called."""
    max_model_len: int | None = None
    """Longest context to serve, in tokens. If None, it is `max_position`."""
    rope_context: int | None = None
    """In tokens; None if RoPE does not depend on it."""
    file_field_names: Mapping[str, str] = field(default_factory=dict, compare=False)
    transformers_config: Mapping[str, Any] | None = None
    """Set if transformers' class computes the model."""
