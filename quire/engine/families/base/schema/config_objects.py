"""Fields of config.json that few families have, and objects within it: types and bounds, as
engine/families/base/schema/config_schema.py has those of all others. And the bounds that several files' fields have."""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta

MAX_WIDTH = 2**24
Width = Annotated[int, Meta(ge=1, le=MAX_WIDTH)]
"""Of hidden states, of heads, of MLPs; and numbers of heads and experts."""
WidthOrZero = Annotated[int, Meta(ge=0, le=2**24)]
PositiveFloat = Annotated[float, Meta(gt=0, le=1e12)]
ShortText = Annotated[str, Meta(max_length=256)]
_LayerIndex = Annotated[int, Meta(ge=0, le=4096)]


class AttnConfig(TypedDict, total=False):
    """MPT's attention."""

    alibi: bool | None
    clip_qkv: float | None
    qk_ln: bool | None
    prefix_lm: bool | None
    softmax_scale: PositiveFloat | None


class EagleConfig(TypedDict, total=False):
    """What config.json of an EAGLE-3 head says of the served model."""

    eagle_aux_hidden_state_layer_ids: Annotated[list[_LayerIndex], Meta(min_length=1, max_length=16)] | None
    use_aux_hidden_state: bool | None


class LayerOverrides(TypedDict, total=False):
    """What a layer has otherwise than most."""

    head_dim: Width | None
    num_key_value_heads: Width | None


class Gemma4Fields(TypedDict, total=False):
    """Gemma 4's, whose layers differ."""

    global_head_dim: Width | None
    num_global_key_value_heads: Width | None
    per_layer_config: Annotated[dict[str, LayerOverrides], Meta(max_length=4096)] | None
    attention_k_eq_v: bool | None
    num_kv_shared_layers: WidthOrZero | None
    use_double_wide_mlp: bool | None
    hidden_size_per_layer_input: WidthOrZero | None
    vocab_size_per_layer_input: Annotated[int, Meta(ge=1, le=2**26)] | None
    enable_moe_block: bool | None
