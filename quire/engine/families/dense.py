"""Families with RMSNorms and an MLP in every layer, each as it differs from another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.checkpoint.fields import LONGROPE, OneRope
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.checkpoint.layouts import rope_of_layers
from quire.engine.errors import ModelError
from quire.engine.families.config_fields import ConfigReader, attention_bias_readers, field_reader, flag_reader
from quire.engine.families.family import Family, FamilyEntry, FamilySpecBuilder, sliding_windows, window_only_ropes

POST_NORMS = {"input_norm": False, "output_norm": True}
"""Norms stand behind attention and the MLP instead of before them."""


def ropes_by_window_reader(full: ConfigReader, sliding: ConfigReader) -> ConfigReader:
    """Reads rotations of layers that attend: of those with a window, and of those without one, which alone may be
    scaled. full, sliding: read rope_theta where a rotation does not say it."""

    def read_ropes(config: ModelConfig) -> list[dict[str, Any]]:
        ropes, scaling = config.raw.get("rope_parameters") or {}, config.raw.get("rope_scaling") or {}
        full_fields, positions = (
            {**(ropes.get("full_attention") or {}), **scaling},
            config.raw.get("max_position_embeddings"),
        )
        full_rope = rope_of_layers(cast(OneRope, full_fields), full(config), positions)
        sliding_rope = rope_of_layers(ropes.get("sliding_attention"), sliding(config), positions)
        return [full_rope if window is None else sliding_rope for window in sliding_windows(config)]

    return read_ropes


def interleaved_nope_ropes(config: ModelConfig) -> list[dict[str, Any] | None]:
    """One of every few layers leaves positions out (NoPE: Yang et al., 2025)."""
    every, layers = config.raw.get("no_rope_layer_interval") or 4, config.num_layers
    uses_rope = config.raw.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    return [config.rope if rotated else None for rotated in uses_rope]


def _exaone_ropes(config: ModelConfig) -> list[dict[str, Any] | None]:
    """In models with windows, layers without one leave positions out."""
    slides = config.raw.get("sliding_window", 4096) is not None
    return window_only_ropes(config) if slides else [config.rope] * config.num_layers


def _gemma3_spec(config: ModelConfig, build_spec: FamilySpecBuilder) -> DecoderSpec:
    raw = config.raw
    if raw.get("use_bidirectional_attention"):
        raise ModelError("model: use_bidirectional_attention is not supported: it makes an encoder")
    if not isinstance(every := raw.get("sliding_window_pattern") or 6, int):
        raise ModelError(f"model: config.json: sliding_window_pattern: expected int, got {every!r}")
    return _GEMMA3(config, build_spec)


_GEMMA3 = Family(
    base="gemma2",
    attention={
        "qk_norm": "heads",
        "softcap": None,
        "rope": ropes_by_window_reader(
            field_reader("rope_theta", 1_000_000.0), field_reader("rope_local_base_freq", 10_000.0)
        ),
    },
    decoder={"logit_softcap": lambda config: config.raw.get("final_logit_softcapping")},
)


def residual_multiplier(config: ModelConfig) -> float:
    return config.raw.get("residual_multiplier") or 1.0


def _granite_swa_spec(config: ModelConfig, build_spec: FamilySpecBuilder) -> DecoderSpec:
    raw, layers = config.raw, config.num_layers
    thetas = raw.get("layer_rope_theta") or [config.rope["rope_theta"]] * layers
    if not raw.get("layer_types"):
        raise ModelError("model: config.json of a 'granite_swa' lacks layer_types, needed to know its windows")
    if len(thetas) != layers or any(0 < theta < 1 for theta in thetas):
        raise ModelError(
            f"model: config.json: layer_rope_theta: {len(thetas)} entries, 0 or from 1 on, for {layers} layers"
        )
    ropes = [config.rope | {"rope_theta": theta} if theta else None for theta in thetas]
    return Family(base="granite", attention={"window": sliding_windows, "rope": ropes, "sinks": True})(
        config, build_spec
    )


def phi3_rope(config: ModelConfig) -> dict[str, Any]:
    """LongRoPE, in the names of today."""
    raw, rope = config.raw, dict(config.rope)
    if rope["rope_type"] not in LONGROPE:
        return rope
    old = rope["original_max_position_embeddings"]
    trained = raw.get("max_position_embeddings") or config.max_position
    return rope | {
        "rope_type": "longrope",
        "original_max_position_embeddings": old,
        "max_position_embeddings": config.rope_context or config.context or config.max_position,
        "factor": rope.get("factor") or trained / old,
    }


TABLE: Mapping[str, FamilyEntry] = {
    # Llama 2 and 3 (Touvron et al., 2023; Dubey et al., 2024), and the many models of that shape.
    "llama": Family(attention=attention_bias_readers("attention_bias"), mlp={"bias": flag_reader("mlp_bias")}),
    # Mistral 7B and its kin (Jiang et al., 2023): every layer may have a sliding window.
    "mistral": Family(attention={"window": lambda config: config.raw.get("sliding_window", 4096) or None}),
    # Ministral 3 and its kin (Mistral AI, 2025): YaRN, and queries that grow with their position.
    "ministral3": Family(attention={"window": field_reader("sliding_window")}),
    # Qwen2 and Qwen2.5 (Yang et al., 2024): some models slide a window in upper layers.
    **dict.fromkeys(
        ("qwen2", "qwen2_5_vl_text", "qwen2_vl_text"), Family(attention={"window": sliding_windows, "qkv_bias": True})
    ),
    # Qwen3, dense (Yang et al., 2025): norms of every query and key head, no biases by default.
    **dict.fromkeys(
        ("qwen3", "qwen3_vl_text"),
        Family(base="qwen2", attention={"qk_norm": "heads", **attention_bias_readers("attention_bias")}),
    ),
    # SmolLM3 (Bakouch et al., 2025).
    "smollm3": Family(base="llama", attention={"window": sliding_windows, "rope": interleaved_nope_ropes}),
    # Gemma (Gemma Team, 2024): a GELU gate, scaled embeddings, a tied head, norms whose weights are offsets from 1.
    "gemma": Family(
        norm=lambda config: NormSpec(config.norm_eps, 1.0),
        attention=attention_bias_readers("attention_bias"),
        mlp={"activation": "gelu_tanh"},
        decoder={"embedding_scale": lambda config: config.hidden_size**0.5},
    ),
    # Gemma 2 (Gemma Team, 2024): norms behind attention and the MLP too, capped scores and logits, and a sliding window
    # in every other layer.
    "gemma2": Family(
        base="gemma",
        attention={
            "window": sliding_windows,
            "scale": lambda config: (config.raw.get("query_pre_attn_scalar") or 256.0) ** -0.5,
            "softcap": lambda config: config.raw.get("attn_logit_softcapping", 50.0),
            "output_norm": True,
        },
        mlp={"output_norm": True},
        decoder={"logit_softcap": lambda config: config.raw.get("final_logit_softcapping", 30.0)},
    ),
    # Gemma 3's text models (Gemma Team, 2025): norms of queries and keys instead of capped scores; layers without a
    # window, by default every sixth, have a rotation of their own.
    "gemma3_text": _gemma3_spec,
    # Apertus (Swiss AI, 2025): an MLP without a gate but with xIELU, whose numbers each layer has learned.
    "apertus": Family(
        attention={"qk_norm": "heads", **attention_bias_readers("attention_bias")},
        mlp={"gated": False, "activation": "xielu"},
    ),
    # Arcee's AFM (Arcee AI, 2025): the MLP has no gate but a squared ReLU.
    "arcee": Family(base="llama", mlp={"gated": False, "activation": "relu2"}),
    # ERNIE 4.5, dense (Baidu, 2025): rotations of neighbours, and biases everywhere or nowhere.
    "ernie4_5": Family(attention=attention_bias_readers("use_bias"), mlp={"bias": flag_reader("use_bias")}),
    # EXAONE 4 (LG AI Research, 2025).
    "exaone4": Family(
        attention={"qk_norm": "heads", "window": sliding_windows, "rope": _exaone_ropes, **POST_NORMS}, mlp=POST_NORMS
    ),
    # GLM-4 as transformers has it (GLM Team, 2024): rotations of neighbours in half of each head.
    "glm": Family(attention={"qkv_bias": flag_reader("attention_bias")}),
    # GLM-4-0414 (GLM Team, 2025): norms behind attention and the MLP too.
    "glm4": Family(base="glm", attention={"output_norm": True}, mlp={"output_norm": True}),
    # Granite 3 and 4 (IBM, 2024): multipliers of embeddings, residuals, scores and logits. The residual stream is held
    # divided by what is multiplied to all that joins it: norms take no notice of a factor, but for their eps, which is
    # divided by its square.
    "granite": Family(
        base="llama",
        norm=lambda config: NormSpec(config.norm_eps / residual_multiplier(config) ** 2),
        attention={"scale": field_reader("attention_multiplier", 1.0)},
        decoder={
            "embedding_scale": lambda config: (
                (config.raw.get("embedding_multiplier") or 1.0) / residual_multiplier(config)
            ),
            "residual_multiplier": residual_multiplier,
            "logit_scale": lambda config: 1 / (config.raw.get("logits_scaling") or 1.0),
        },
    ),
    # Granite with sliding windows (IBM, 2026): each layer may have a rotation of its own, or none, and every head has a
    # sink.
    "granite_swa": _granite_swa_spec,
    # Helium 1 (Kyutai, 2025): rotations of neighbours.
    "helium": Family(base="llama", attention={"out_bias": False}),
    # Hunyuan's dense models (Tencent, 2025): norms of queries and keys behind their rotation.
    "hunyuan_v1_dense": Family(base="llama", attention={"qk_norm": "after"}),
    # OLMo 2 (OLMo Team, 2024): norms of whole queries and keys.
    "olmo2": Family(
        attention={"qk_norm": "whole", **attention_bias_readers("attention_bias"), **POST_NORMS}, mlp=POST_NORMS
    ),
    # OLMo 3 (OLMo Team, 2025): sliding windows in three of four layers, whose rotations are not stretched.
    "olmo3": Family(
        base="olmo2",
        attention={
            "window": sliding_windows,
            "rope": ropes_by_window_reader(
                field_reader("rope_theta", 500_000.0), field_reader("rope_theta", 500_000.0)
            ),
        },
    ),
    # Phi-3 and Phi-4 (Abdin et al., 2024): LongRoPE for long contexts, in a part of each head.
    "phi3": Family(attention={"rope": phi3_rope, "window": field_reader("sliding_window")}),
    # Seed-OSS (ByteDance Seed, 2025): biases of queries, keys and values.
    "seed_oss": Family(base="llama", attention={"out_bias": flag_reader("attention_out_bias")}),
}
