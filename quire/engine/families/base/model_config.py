"""A decoder's shape as config.json gives it, by the names of Llama's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.engine.families.base.schema.config_schema import FamilyConfigFields


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape, read from config.json.

    Fields that only some families have stay in `raw`, where the family's file reads them.
    """

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
    """The checkpoint's type, as checkpoint_dtype reads it."""
    rope: dict[str, Any]
    """rope_type, rope_theta, and the keys that the rope_type adds to them."""
    raw: FamilyConfigFields
    """Each field of its declared type, or None."""
    eos_token_ids: tuple[int, ...] = ()
    """All tokens that end an answer, as read_eos_token_ids finds them; (): nobody has looked."""
    max_model_len: int | None = None
    """Tokens of the longest context that will be served; None: `max_position`."""
    rope_context: int | None = None
    """Tokens of the context for which rotations are chosen; None: they depend on none."""
    file_field_names: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By our names of fields, those in the file, where these are others."""
    transformers_config: Mapping[str, Any] | None = None
    """The whole of config.json, where transformers' class serves the model; None: a family of ours does."""
