"""Types and bounds of config.json. Without bounds, a bad file could take unlimited time or memory. null means a missing
field.
"""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

from msgspec import Meta

from quire.engine.families.base.schema.config_objects import (
    AttnConfig,
    ConvWidth,
    EagleConfig,
    Gemma4Fields,
    IndexerFields,
    KimiLinearFields,
    PositiveFloat,
    ShortText,
    Width,
    WidthOrZero,
)
from quire.engine.families.base.schema.quantization_schema import QuantizationConfig

MAX_LAYERS = 4096
MAX_LABELS = 2**16
MAX_POSITIONS = 2**28
LONGROPE_TYPES = ("longrope", "su", "yarn")
"""In Phi, "yarn" is LongRoPE; in other families it is YaRN."""
_NumLayers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
_NumLayersOrZero = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
_VocabSize = Annotated[int, Meta(ge=1, le=2**26)]
_NumPositions = Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]
_Theta = Annotated[float, Meta(ge=1, le=1e15)]
_Mscale = Annotated[float, Meta(ge=0, le=1e12)]
_Fraction = Annotated[float, Meta(gt=0, le=1)]
_Epsilon = Annotated[float, Meta(ge=0, le=1)]
_NumExperts = Annotated[int, Meta(ge=1, le=4096)]
_NumExpertsOrZero = Annotated[int, Meta(ge=0, le=4096)]
_TokenId = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
_TokenIds = Annotated[list[_TokenId], Meta(max_length=4096)]
_LayerLetters = Annotated[str, Meta(pattern="^[LG]+$", max_length=256)]
"""EXAONE 4's repeated pattern: L layers have a window, G layers do not."""

TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config")
SIZE_FIELD_ALIASES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "seq_length"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "moe_topk"),
}


class RopeFields(TypedDict, total=False):
    """See `rope_table` in layers/rope.py for the fields of each rope_type."""

    rope_type: ShortText | None
    type: ShortText | None
    rope_theta: _Theta | None
    factor: PositiveFloat | None
    low_freq_factor: PositiveFloat | None
    high_freq_factor: PositiveFloat | None
    original_max_position_embeddings: _NumPositions | None
    beta_fast: PositiveFloat | None
    beta_slow: PositiveFloat | None
    attention_factor: PositiveFloat | None
    mscale: _Mscale | None
    mscale_all_dim: _Mscale | None
    truncate: bool | None
    factors: Annotated[list[PositiveFloat], Meta(max_length=2**16)] | None
    mixed_b: Annotated[float, Meta(ge=0, le=64)] | None
    short_factor: Annotated[list[PositiveFloat], Meta(max_length=2**16)] | None
    long_factor: Annotated[list[PositiveFloat], Meta(max_length=2**16)] | None
    partial_rotary_factor: _Fraction | None
    short_mscale: PositiveFloat | None
    long_mscale: PositiveFloat | None
    llama_4_scaling_beta: Annotated[float, Meta(ge=0, le=1e3)] | None
    alpha: Annotated[float, Meta(gt=0, le=1e6)] | None
    mrope_section: Annotated[list[WidthOrZero], Meta(max_length=8)] | None


class RopesByLayerType(RopeFields, total=False):
    """RoPE of all layers or, in Gemma 3, one set per layer type."""

    full_attention: RopeFields | None
    sliding_attention: RopeFields | None


class CommonConfigFields(Gemma4Fields, KimiLinearFields, IndexerFields, total=False):
    """Both the server and `quire plan` read these fields."""

    model_type: ShortText | None
    is_encoder_decoder: bool | None
    vocab_size: _VocabSize | None
    hidden_size: Width | None
    intermediate_size: Width | list[Any] | None
    num_hidden_layers: _NumLayers | None
    num_attention_heads: Width | list[Any] | None
    num_key_value_heads: Width | list[Any] | None
    max_position_embeddings: _NumPositions | None
    tie_word_embeddings: bool | None
    attention_bias: bool | None
    mlp_bias: bool | None
    dtype: ShortText | None
    torch_dtype: ShortText | None
    quantization_config: QuantizationConfig | None
    layer_types: list[ShortText] | None
    sliding_window_pattern: _NumLayersOrZero | _LayerLetters | None
    use_sliding_window: bool | None
    max_window_layers: _NumLayersOrZero | None
    full_attn_idxs: list[int] | None
    conv_L_cache: ConvWidth | None
    conv_bias: bool | None
    block_ff_dim: Width | None
    block_multiple_of: Width | None
    block_ffn_dim_multiplier: PositiveFloat | None
    block_auto_adjust_ff_dim: bool | None
    lm_head_bias: bool | None
    tie_embedding: bool | None
    full_attention_interval: _NumLayers | None
    linear_conv_kernel_dim: ConvWidth | None
    linear_key_head_dim: Width | None
    linear_value_head_dim: Width | None
    linear_num_key_heads: Width | None
    linear_num_value_heads: Width | None
    hybrid_override_pattern: Annotated[str, Meta(pattern="^[M*E-]+$", max_length=MAX_LAYERS)] | None
    mtp_hybrid_override_pattern: Annotated[str, Meta(pattern="^[M*E-]+$", max_length=64)] | None
    mtp_layers_block_type: Annotated[list[ShortText], Meta(min_length=1, max_length=64)] | None
    attn_layer_indices: Annotated[list[int], Meta(max_length=MAX_LAYERS)] | None
    mamba_n_heads: Width | None
    mamba_d_head: Width | ShortText | None
    mamba_n_groups: Width | None
    mamba_d_state: Width | None
    mamba_d_conv: ConvWidth | None
    mamba_d_ssm: Width | None
    mamba_expand: Width | None
    mamba_conv_bias: bool | None
    mamba_proj_bias: bool | None
    mamba_rms_norm: bool | None
    mamba_norm_before_gate: bool | None
    mamba_dt_rank: Width | ShortText | None
    num_mem_blocks: _NumLayers | None
    adapter_rank: Width | None
    use_shared_attention_adapter: bool | None
    attn_layer_period: _NumLayers | None
    attn_layer_offset: _NumLayersOrZero | None
    expert_layer_period: _NumLayers | None
    expert_layer_offset: _NumLayersOrZero | None
    kv_lora_rank: Width | None
    q_lora_rank: Width | None
    qk_rope_head_dim: WidthOrZero | None
    qk_nope_head_dim: WidthOrZero | None
    v_head_dim: Width | None
    mlp_layer_types: Annotated[list[ShortText], Meta(max_length=MAX_LAYERS)] | None
    multi_query: bool | None
    new_decoder_architecture: bool | None
    use_bias: bool | None
    shared_intermediate_size: WidthOrZero | None
    mlp_only_layers: list[int] | None
    first_k_dense_replace: _NumLayersOrZero | None
    moe_layer_end_index: Annotated[int, Meta(ge=-1, le=MAX_LAYERS)] | None
    moe_layers: Annotated[list[int], Meta(max_length=MAX_LAYERS)] | None
    interleave_moe_layer_step: _NumLayersOrZero | None
    intermediate_size_mlp: Width | None
    attention_chunk_size: _NumPositions | None


class CrossEncoderFields(TypedDict, total=False):
    activation_fn: ShortText | None


class FamilyConfigFields(CommonConfigFields, total=False):
    architectures: list[ShortText] | None
    head_dim: Width | None
    rms_norm_eps: _Epsilon | None
    hidden_act: ShortText | None
    hidden_activation: ShortText | None
    projection_dim: Width | None
    projection_size: Width | None
    eos_token_id: _TokenId | _TokenIds | None
    rope_theta: _Theta | None
    rope_parameters: RopesByLayerType | None
    rope_scaling: RopesByLayerType | None
    rope_local_base_freq: _Theta | None
    sliding_window: Annotated[int, Meta(ge=0, le=MAX_POSITIONS)] | None
    no_rope_layers: list[int] | None
    no_rope_layer_interval: _NumLayers | None
    attn_temperature_tuning: bool | int | None
    floor_scale: _NumPositions | None
    attn_scale: Annotated[float, Meta(ge=0, le=1e3)] | None
    query_pre_attn_scalar: PositiveFloat | None
    attn_logit_softcapping: PositiveFloat | None
    final_logit_softcapping: PositiveFloat | None
    use_bidirectional_attention: bool | ShortText | None
    num_local_experts: _NumExpertsOrZero | None
    num_experts: _NumExperts | None
    num_experts_per_tok: _NumExpertsOrZero | None
    moe_intermediate_size: Width | None
    shared_expert_intermediate_size: Width | None
    n_shared_experts: _NumExpertsOrZero | None
    norm_topk_prob: bool | None
    moe_norm_min: _Epsilon | None
    n_group: _NumExperts | None
    topk_group: _NumExperts | None
    routed_scaling_factor: PositiveFloat | None
    use_expert_bias: bool | None
    router_jitter_noise: _Epsilon | None
    decoder_sparse_step: _NumLayers | None
    num_nextn_predict_layers: _NumLayersOrZero | None
    qkv_bias: bool | None
    clip_qkv: float | None
    attention_out_bias: bool | None
    use_qkv_bias: bool | None
    enable_bias: bool | None
    partial_rotary_factor: _Fraction | None
    rotary_dim: Width | None
    original_max_position_embeddings: _NumPositions | None
    layer_rope_theta: list[Annotated[float, Meta(ge=0, le=1e15)]] | None
    time_step_limit: Annotated[list[float], Meta(min_length=2, max_length=2)] | None
    time_step_min: _Epsilon | None
    use_mem_rope: bool | None
    use_sandwich_norm: bool | None
    use_attention_gate: bool | None
    mamba_hidden_act: ShortText | None
    mixer_rms_eps: _Epsilon | None
    projectors_bias: bool | None
    moe_latent_size: Width | None
    attention_in_multiplier: PositiveFloat | None
    attention_out_multiplier: PositiveFloat | None
    key_multiplier: PositiveFloat | None
    lm_head_multiplier: PositiveFloat | None
    mlp_multipliers: Annotated[list[PositiveFloat], Meta(min_length=2, max_length=2)] | None
    ssm_in_multiplier: PositiveFloat | None
    ssm_out_multiplier: PositiveFloat | None
    ssm_multipliers: Annotated[list[PositiveFloat], Meta(min_length=5, max_length=5)] | None
    embedding_multiplier: PositiveFloat | None
    residual_multiplier: PositiveFloat | None
    attention_multiplier: PositiveFloat | None
    logits_scaling: PositiveFloat | None
    logit_scale: PositiveFloat | ShortText | None
    scale_emb: PositiveFloat | None
    scale_depth: PositiveFloat | None
    dim_model_base: Width | None
    rope_interleave: bool | None
    topk_method: ShortText | None
    use_parallel_residual: bool | None
    parallel_attn: bool | None
    num_ln_in_parallel_attn: Width | None
    alibi: bool | None
    attn_config: AttnConfig | None
    use_qk_norm: bool | None
    qk_layernorm: bool | None
    scale_attn_weights: bool | None
    scale_attn_by_inverse_layer_idx: bool | None
    add_cross_attention: bool | None
    word_embed_proj_dim: Width | None
    do_layer_norm_before: bool | None
    layer_norm_elementwise_affine: bool | None
    apply_residual_connection_post_layernorm: bool | None
    no_bias: bool | None
    swiglu_alpha: PositiveFloat | None
    swiglu_limit: PositiveFloat | None
    activation: ShortText | None
    layer_norm_eps: _Epsilon | None
    layer_norm_epsilon: _Epsilon | None
    norm_eps: _Epsilon | None
    norm_bias: bool | None
    type_vocab_size: WidthOrZero | None
    pad_token_id: _TokenId | None
    position_embedding_type: ShortText | None
    layer_norm_type: ShortText | None
    logn_attention_scale: bool | None
    pack_qkv: bool | None
    relative_attention_num_buckets: Width | None
    local_attention: _NumPositions | None
    global_attn_every_n_layers: _NumLayers | None
    global_rope_theta: _Theta | None
    local_rope_theta: _Theta | None
    rotary_emb_base: _Theta | None
    rotary_scaling_factor: float | None
    prenorm: bool | None
    qkv_proj_bias: bool | None
    mlp_fc1_bias: bool | None
    classifier_bias: bool | None
    classifier_activation: ShortText | None
    id2label: Annotated[dict[ShortText, ShortText], Meta(max_length=MAX_LABELS)] | None
    num_labels: Width | None
    problem_type: ShortText | None
    classifier_pooling: ShortText | None
    sentence_transformers: CrossEncoderFields | None
    sbert_ce_default_activation_function: ShortText | None
    draft_vocab_size: _VocabSize | None
    norm_before_residual: bool | None
    eagle_config: EagleConfig | None


_EXPERT_COUNT_TYPE = WidthOrZero | list[Any] | None
_SIZE_TYPES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "num_attention_heads", "intermediate_size"), Width | None),
    "num_hidden_layers": _NumLayers | None,
    "max_position_embeddings": _NumPositions | None,
    "experts": _EXPERT_COUNT_TYPE,
    "experts_per_token": _EXPERT_COUNT_TYPE,
}
_Sizes = TypedDict(  # type: ignore[misc]  # the fields are computed from SIZE_FIELD_ALIASES
    "_Sizes",
    {
        key: kind
        for size, kind in _SIZE_TYPES.items()
        for key in SIZE_FIELD_ALIASES[size]
        if key not in CommonConfigFields.__annotations__
    },
    total=False,
)


class PlanConfigFields(CommonConfigFields, _Sizes, total=False):
    head_dim: WidthOrZero | None
    num_kv_heads: Width | list[Any] | None
    kv_channels: Width | None
    sliding_window: Any
    expansion_ratio: PositiveFloat | None
    layers_block_type: list[ShortText] | None
    moe_intermediate_size: Width | list[Any] | None
    shared_expert_intermediate_size: WidthOrZero | None
    n_shared_experts: WidthOrZero | None
    decoder_sparse_step: _NumLayersOrZero | None


class TransformersConfigFields(PlanConfigFields, total=False):
    """transformers' classes read other fields themselves."""

    architectures: list[ShortText] | None
    is_decoder: bool | None
    eos_token_id: _TokenId | _TokenIds | None


class GenerationConfigFields(TypedDict, total=False):
    """The bounds are those of SamplingParams."""

    do_sample: bool | None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None
    top_n_sigma: Annotated[float, Meta(ge=-1, le=100)] | None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] | None
    xtc_threshold: Annotated[float, Meta(ge=0, le=1)] | None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] | None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None
    dry_base: Annotated[float, Meta(ge=1, le=100)] | None
    dry_allowed_length: Annotated[int, Meta(ge=1, le=1024)] | None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1, lt=2**31)] | None
    eos_token_id: _TokenId | _TokenIds | None
