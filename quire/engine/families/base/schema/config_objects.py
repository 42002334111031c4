"""Rare fields and nested objects of config.json, and shared bounds."""

from __future__ import annotations

from typing import Annotated, TypedDict

from msgspec import Meta

MAX_WIDTH = 2**24
Width = Annotated[int, Meta(ge=1, le=MAX_WIDTH)]
WidthOrZero = Annotated[int, Meta(ge=0, le=2**24)]
PositiveFloat = Annotated[float, Meta(gt=0, le=1e12)]
ConvWidth = Annotated[int, Meta(ge=2, le=16)]
ShortText = Annotated[str, Meta(max_length=256)]
_LayerIndex = Annotated[int, Meta(ge=0, le=4096)]


class AttnConfig(TypedDict, total=False):
    alibi: bool | None
    clip_qkv: float | None
    qk_ln: bool | None
    prefix_lm: bool | None
    softmax_scale: PositiveFloat | None


class EagleConfig(TypedDict, total=False):
    eagle_aux_hidden_state_layer_ids: Annotated[list[_LayerIndex], Meta(min_length=1, max_length=16)] | None
    use_aux_hidden_state: bool | None


class LayerOverrides(TypedDict, total=False):
    head_dim: Width | None
    num_key_value_heads: Width | None


class Gemma4Fields(TypedDict, total=False):
    global_head_dim: Width | None
    num_global_key_value_heads: Width | None
    per_layer_config: Annotated[dict[str, LayerOverrides], Meta(max_length=4096)] | None
    attention_k_eq_v: bool | None
    num_kv_shared_layers: WidthOrZero | None
    use_double_wide_mlp: bool | None
    hidden_size_per_layer_input: WidthOrZero | None
    vocab_size_per_layer_input: Annotated[int, Meta(ge=1, le=2**26)] | None
    enable_moe_block: bool | None


class LinearAttnConfig(TypedDict, total=False):
    """Layers are numbered from 1."""

    num_heads: Width | None
    head_dim: Width | None
    short_conv_kernel_size: ConvWidth | None
    kda_layers: Annotated[list[_LayerIndex], Meta(max_length=4096)] | None
    full_attn_layers: Annotated[list[_LayerIndex], Meta(max_length=4096)] | None
    gate_lower_bound: float | None
    use_full_rank_gate: bool | None


class KimiLinearFields(TypedDict, total=False):
    linear_attn_config: LinearAttnConfig | None
    linear_num_heads: Width | None
    linear_head_dim: Width | None
    mla_use_nope: bool | None
    mla_use_output_gate: bool | None
    moe_layer_freq: Width | None
    moe_router_activation_func: ShortText | None
    attn_res_block_size: WidthOrZero | None
    routed_expert_hidden_size: WidthOrZero | None


class IndexerFields(TypedDict, total=False):
    """Sparse attention of DeepSeek-V3.2 and GLM-5."""

    index_n_heads: Annotated[int, Meta(ge=1, le=4096)] | None
    index_head_dim: Annotated[int, Meta(ge=1, le=2**16)] | None
    index_topk: Width | None
    indexer_types: Annotated[list[ShortText], Meta(max_length=4096)] | None
    index_topk_pattern: Annotated[str, Meta(max_length=4096)] | Annotated[list[ShortText], Meta(max_length=4096)] | None
    index_topk_freq: WidthOrZero | None
    index_skip_topk_offset: WidthOrZero | None
