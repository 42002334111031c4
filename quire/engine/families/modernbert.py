"""ModernBERT (Warner et al., 2024): pre-norms, RoPE, a gated MLP, and windows in two of three layers."""

from __future__ import annotations

from typing import Any

from quire.engine.architecture import EncoderSpec, EncoderWeightNames, HeadLayerSpec, parse_encoder_activation
from quire.engine.common.errors import ModelError
from quire.engine.families.base import EncoderFamily, ModelConfig, base_encoder_spec, normalize_rope

_WEIGHT_NAMES = EncoderWeightNames(
    word_embeddings="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layer_template="layers.{}",
    qkv=("attn.Wqkv",),
    out="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi",),
    down="mlp.Wo",
    mlp_norm="mlp_norm",
    final_norm="final_norm",
)


def _build_modernbert_spec(config: ModelConfig) -> EncoderSpec:
    raw = config.raw
    if bool(raw.get("attention_bias")) or bool(raw.get("mlp_bias")):
        raise ModelError("model: config.json: attention_bias and mlp_bias are not supported in a ModernBERT")
    every = raw.get("global_attn_every_n_layers") or 3
    default = ["sliding_attention" if layer % every else "full_attention" for layer in range(config.num_layers)]
    types = raw.get("layer_types") or default
    window = (raw.get("local_attention") or 128) // 2
    eps, norm_bias = raw.get("norm_eps") or 1e-5, bool(raw.get("norm_bias"))
    head_bias = bool(raw.get("classifier_bias"))
    if (act := raw.get("classifier_activation") or "gelu") != "gelu":
        raise ModelError(f"model: config.json: classifier_activation {act!r} is not supported")

    def classifier(hidden: int, labels: int) -> list[HeadLayerSpec]:
        head = HeadLayerSpec("head.dense", hidden, hidden, head_bias, "gelu", "head.norm", norm_bias, eps)
        return [head, HeadLayerSpec("classifier", hidden, labels)]

    return base_encoder_spec(
        config,
        names=_WEIGHT_NAMES,
        classifier=classifier,
        eps=eps,
        activation=parse_encoder_activation(raw.get("hidden_activation") or "gelu"),
        ropes=tuple(_layer_type_rope(config, kind) for kind in types),
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        bias=False,
        norm_bias=norm_bias,
        gated=True,
        pre_norm=True,
        unused_prefixes=("decoder.", "head."),
    )


def _layer_type_rope(config: ModelConfig, kind: str) -> dict[str, Any]:
    raw = config.raw
    ropes = raw.get("rope_parameters") or {}
    if kind == "full_attention":
        rope_fields, theta = ropes.get("full_attention"), raw.get("global_rope_theta") or 160_000.0
    else:
        rope_fields, theta = ropes.get("sliding_attention"), raw.get("local_rope_theta") or 10_000.0
    return normalize_rope(rope_fields, {"rope_theta": theta}, raw.get("max_position_embeddings"))


MODERNBERT = EncoderFamily(
    model_types=("modernbert",),
    defaults={"max_position_embeddings": 8192},
    build_spec=_build_modernbert_spec,
    reads_classifier_pooling=True,
)
