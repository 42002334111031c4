from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from quire.engine.architecture.mla import IndexerSpec, MLALayerSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.rope import yarn_softmax_scale_factor
from quire.engine.architecture.sublayer import SublayerSpec
from quire.engine.common.errors import ModelError
from quire.engine.families.base.config_fields import ConfigReader
from quire.engine.families.base.model_config import ModelConfig
from quire.kernels.parameters.latent import MAX_ROPE_DIM

MLA_SIZE_FIELDS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
MLA_NORM_EPS = 1e-6
"""All families use this epsilon for latents and index keys, instead of rms_norm_eps."""
_PARTIAL_ROTARY_FIELDS = ("partial_rotary_factor", "rotary_dim")
"""qk_rope_head_dim replaces these in older files."""


def mla_mixers_reader(
    is_interleaved: ConfigReader = lambda config: True, *, read_indexer: ConfigReader = lambda config: None
) -> Callable[[ModelConfig, NormSpec], Sequence[SublayerSpec | None]]:
    """`is_interleaved` returns whether RoPE pairs neighbors."""

    def read_mixers(config: ModelConfig, norm: NormSpec) -> Sequence[SublayerSpec | None]:
        spec = mla_spec(config, norm, is_interleaved=is_interleaved(config))
        return [replace(spec, indexer=read_indexer(config))] * config.num_layers

    return read_mixers


def indexer_reader(*, is_interleaved: bool) -> ConfigReader:
    """`is_interleaved` applies to the indexer's own RoPE. The reader raises ModelError."""

    def read_indexer(config: ModelConfig) -> IndexerSpec:
        raw = config.raw
        names = ("index_n_heads", "index_head_dim", "index_topk", "qk_rope_head_dim")
        sizes: list[Any] = [raw.get(name) or 0 for name in names]
        num_heads, head_dim, top_k, rotated = sizes
        if head_dim % 2 or head_dim < rotated:
            raise ModelError(
                "model: config.json: index_head_dim: expected an even number from qk_rope_head_dim "
                f"({rotated}) on, got {head_dim}"
            )
        if raw.get("q_lora_rank") is None:
            raise ModelError("model: config.json: q_lora_rank: the indexer of sparse attention needs query latents")
        key_norm = NormSpec(MLA_NORM_EPS, is_layer_norm=True, bias=True)
        return IndexerSpec(num_heads, head_dim, top_k, is_interleaved, key_norm)

    return read_indexer


def mla_spec(
    config: ModelConfig, norm: NormSpec, *, is_interleaved: bool = True, has_rope: bool = True
) -> MLALayerSpec:
    """Raises ModelError."""
    raw = config.raw
    sizes: dict[str, Any] = {name: raw.get(name) for name in MLA_SIZE_FIELDS}
    for name, size in sizes.items():
        if not size:
            raise ModelError(f"model: config.json of a {config.model_type!r} lacks {name}, needed for its attention")
        if size % 2:
            raise ModelError(f"model: config.json: {name}: must be even, got {size}")
    kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim = sizes.values()
    if qk_rope_head_dim > MAX_ROPE_DIM:
        raise ModelError(
            f"model: config.json: qk_rope_head_dim: up to {MAX_ROPE_DIM} are served, got {qk_rope_head_dim}"
        )
    rope = {name: each for name, each in config.rope.items() if name not in _PARTIAL_ROTARY_FIELDS}
    return MLALayerSpec(
        num_heads=config.num_heads,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        qk_nope_head_dim=qk_nope_head_dim,
        v_head_dim=v_head_dim,
        q_lora_rank=raw.get("q_lora_rank"),
        scale=(qk_nope_head_dim + qk_rope_head_dim) ** -0.5 * (yarn_softmax_scale_factor(rope) if has_rope else 1.0),
        rope=rope if has_rope else None,
        norm=norm,
        latent_eps=MLA_NORM_EPS,
        is_interleaved=is_interleaved,
        bias=bool(raw.get("attention_bias")),
    )


def fill_mla_head_dims(fields: dict[str, Any]) -> None:
    """As in transformers, head_dim becomes the number of rotated elements."""
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if fields.get("v_head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        fields["v_head_dim"] = hidden // heads
    if isinstance(fields.get("qk_rope_head_dim"), int):
        fields["head_dim"] = fields["qk_rope_head_dim"]
