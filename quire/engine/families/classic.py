"""Families with LayerNorms: parallel blocks, MLPs without gates, learned positions, ALiBi."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.engine.architecture.decoder import DecoderSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.checkpoint.files import ModelConfig
from quire.engine.errors import ModelError
from quire.engine.families.activations import hidden_activation
from quire.engine.families.config_fields import (
    SpecFields,
    attention_bias_readers,
    default_true_reader,
    field_reader,
    flag_reader,
)
from quire.engine.families.family import Family, FamilyEntry, FamilySpecBuilder, sliding_windows, window_only_ropes

_PARALLEL_MLP: SpecFields = {"parallel": True, "shares_norm": True}
"""The MLP reads what attention reads, behind the same norm."""


def _layer_norm_reader(*, offset: float = 0.0, bias: bool = True) -> Callable[[ModelConfig], NormSpec]:
    return lambda config: NormSpec(config.norm_eps, offset, is_layer_norm=True, bias=bias)


def _ungated_activation(config: ModelConfig) -> str:
    """The function of an MLP without a gate. Raises ModelError."""
    activation = hidden_activation(config)
    if activation is None or activation == "silu":
        raise ModelError(f"model: hidden_act {activation!r} is not supported in a {config.model_type!r}")
    return activation


def _layer_norm_family(
    *, bias: Any = True, attention: SpecFields | None = None, mlp: SpecFields | None = None, **others: Any
) -> Family:
    """A family with LayerNorms and MLPs without gates. bias: of all linears of the layers, as a value of Family's."""
    return Family(
        **{"norm": _layer_norm_reader(), **others},
        attention={"qkv_bias": bias, "out_bias": bias, **(attention or {})},
        mlp={"gated": False, "activation": _ungated_activation, "bias": bias, **(mlp or {})},
    )


def _max_position(config: ModelConfig) -> int:
    return config.max_position


def _has_untied_head(config: ModelConfig) -> bool:
    return not config.tie_embeddings


def _gpt2_attention_scales(config: ModelConfig) -> list[float]:
    scale = 1.0 if config.raw.get("scale_attn_weights") is False else config.head_dim**-0.5
    by_layer = config.raw.get("scale_attn_by_inverse_layer_idx")
    return [scale / (layer + 1 if by_layer else 1) for layer in range(config.num_layers)]


def _cohere_logit_scale(config: ModelConfig) -> float:
    if isinstance(scale := config.raw.get("logit_scale"), str):
        raise ModelError(f"model: config.json: logit_scale: expected float, got {scale!r}")
    return 1.0 if scale is None else scale


def _falcon_is_parallel(config: ModelConfig) -> bool:
    return bool(config.raw.get("new_decoder_architecture") or config.raw.get("parallel_attn"))


def _falcon_shares_norm(config: ModelConfig) -> bool:
    norms = config.raw.get("num_ln_in_parallel_attn") or (2 if config.raw.get("new_decoder_architecture") else 1)
    return _falcon_is_parallel(config) and norms == 1


def _mpt_spec(config: ModelConfig, build_spec: FamilySpecBuilder) -> DecoderSpec:
    raw, attention = config.raw, config.raw.get("attn_config") or {}
    if raw.get("no_bias") is False or raw.get("logit_scale") is not None:
        raise ModelError("model: config.json: no_bias: false and logit_scale of an 'mpt' are not supported")
    if attention.get("alibi") is False or any(attention.get(name) for name in ("clip_qkv", "qk_ln", "prefix_lm")):
        raise ModelError(
            "model: config.json: attn_config: without alibi, or with clip_qkv, qk_ln or prefix_lm, it is not supported"
        )
    scale = attention.get("softmax_scale") or config.head_dim**-0.5
    family = _layer_norm_family(
        bias=False, norm=_layer_norm_reader(bias=False), attention={"rope": None, "alibi": 1.0, "scale": scale}
    )
    return family(config, build_spec)


def _opt_spec(config: ModelConfig, build_spec: FamilySpecBuilder) -> DecoderSpec:
    for name in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        if config.raw.get(name) is False:
            raise ModelError(f"model: config.json: {name}: false is not supported")
    if config.raw.get("word_embed_proj_dim") not in (None, config.hidden_size):
        raise ModelError("model: config.json: word_embed_proj_dim: embeddings of another size are not supported")
    family = _layer_norm_family(
        bias=default_true_reader("enable_bias"), attention={"rope": None}, decoder={"positions": _max_position}
    )
    return family(config, build_spec)


TABLE: Mapping[str, FamilyEntry] = {
    # BLOOM (Le Scao et al., 2022): ALiBi, and a norm of the embeddings.
    "bloom": _layer_norm_family(
        unsupported_fields={"apply_residual_connection_post_layernorm": "is not supported"},
        attention={"rope": None, "alibi": 1.0},
        decoder={"embedding_norm": True},
    ),
    # Command R (Cohere, 2024): LayerNorms without a bias, rotations of neighbours, scaled logits.
    "cohere": Family(
        norm=_layer_norm_reader(bias=False),
        attention={
            "qk_norm": lambda config: "centred" if config.raw.get("use_qk_norm") else None,
            **attention_bias_readers("attention_bias"),
        },
        mlp=_PARALLEL_MLP,
        decoder={"logit_scale": _cohere_logit_scale},
    ),
    # Command R7B and A (Cohere, 2025): sliding windows in three of four layers; the others leave positions out.
    "cohere2": Family(base="cohere", attention={"window": sliding_windows, "rope": window_only_ropes}),
    # Falcon (Almazrouei et al., 2023): attention and the MLP side by side, on one norm or on two; some models have
    # ALiBi instead of rotations, which is added to the scores before these are scaled.
    "falcon": _layer_norm_family(
        bias=flag_reader("use_bias"),
        attention={
            "rope": lambda config: None if config.raw.get("alibi") else config.rope,
            "alibi": lambda config: config.head_dim**-0.5 if config.raw.get("alibi") else None,
        },
        mlp={"parallel": _falcon_is_parallel, "shares_norm": _falcon_shares_norm},
    ),
    # GPT-2 (Radford et al., 2019), and StarCoder and SantaCoder (Li et al., 2023), which have one key and value for all
    # heads: learned positions.
    **dict.fromkeys(
        ("gpt2", "gpt_bigcode"),
        _layer_norm_family(
            unsupported_fields={"add_cross_attention": "is not supported: it makes a part of another model"},
            attention={"rope": None, "scale": _gpt2_attention_scales},
            decoder={"positions": _max_position},
        ),
    ),
    # GPT-NeoX and Pythia (Black et al., 2022): attention and the MLP side by side, each on a norm of its own.
    "gpt_neox": _layer_norm_family(
        attention={
            "qkv_bias": default_true_reader("attention_bias"),
            "out_bias": default_true_reader("attention_bias"),
        },
        mlp={"parallel": default_true_reader("use_parallel_residual")},
    ),
    # GPT-J (Wang and Komatsuzaki, 2021): rotations of neighbours in a part of each head, and a head with a bias.
    "gptj": _layer_norm_family(
        attention={"qkv_bias": False, "out_bias": False}, mlp=_PARALLEL_MLP, decoder={"head_bias": _has_untied_head}
    ),
    # MPT (MosaicML, 2023): ALiBi, and no biases at all.
    "mpt": _mpt_spec,
    # Nemotron-4 and Minitron (Nvidia, 2024): the norms' weights are offsets from 1; squared ReLUs.
    "nemotron": _layer_norm_family(
        bias=flag_reader("mlp_bias"),
        norm=_layer_norm_reader(offset=1.0),
        attention=attention_bias_readers("attention_bias"),
    ),
    # OPT (Zhang et al., 2022): GPT-2 with ReLUs.
    "opt": _opt_spec,
    # Phi-1 to Phi-2 (Gunasekar et al., 2023).
    "phi": _layer_norm_family(
        unsupported_fields={"qk_layernorm": "of a 'phi' is not supported"},
        mlp=_PARALLEL_MLP,
        decoder={"head_bias": _has_untied_head},
    ),
    # StableLM (Stability AI, 2023): a Llama with LayerNorms, and rotations in a quarter of each head.
    "stablelm": Family(
        unsupported_fields={"qk_layernorm": "of a 'stablelm' is not supported"},
        norm=_layer_norm_reader(),
        attention={"qkv_bias": flag_reader("use_qkv_bias")},
        mlp={"parallel": flag_reader("use_parallel_residual"), "shares_norm": flag_reader("use_parallel_residual")},
    ),
    # StarCoder2 (Lozhkov et al., 2024): a sliding window in every layer.
    "starcoder2": _layer_norm_family(
        bias=flag_reader("use_bias"), attention={"window": field_reader("sliding_window")}
    ),
}
