"""Estimates sizes of models without a family. Layers are as in Vaswani et al. (2017), with GQA (Ainslie et al., 2023),
gated MLPs (Shazeer, 2020), experts (Fedus et al., 2021) and MLA (DeepSeek-V2, 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.kv_cache_spec import attention_kv_cache_spec
from quire.engine.checkpoint.config_reader import has_quire_family
from quire.engine.checkpoint.sizes.decoder_sizes import DecoderSizes
from quire.engine.checkpoint.transformers_classes import class_rejection_reason
from quire.engine.common.errors import ModelError
from quire.engine.families.base.layer_types import unserved_layer_windows
from quire.engine.families.base.moe_fields import moe_layer_mask, shared_expert_width
from quire.engine.families.base.schema.config_schema import SIZE_FIELD_ALIASES

_UNGATED_MLP_TYPES = {"gpt_neo", "codegen"}
"""Their MLPs have two linears and their norms have biases."""
_LEARNED_POSITION_TYPES = {"gpt_neo"}
"""Their head is tied by default."""


def estimate_decoder_sizes(raw: Mapping[str, Any], text_fields: Mapping[str, Any]) -> DecoderSizes:
    """Raises ModelError naming a missing size."""
    kind = str(text_fields.get("model_type", ""))
    hidden, layers, vocab = (
        read_required_size(text_fields, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    windows = unserved_layer_windows(text_fields, layers)
    if not windows:
        raise ModelError("model: no layer has keys and values to cache, so there is nothing to plan")
    caches_latents = _caches_latents(raw, text_fields)
    attention, kv, formula, width = _count_attention(text_fields, hidden, caches_latents=caches_latents)
    dense, expert, router, shared, sparse = _count_mlp(text_fields, hidden, layers)
    experts = read_optional_size(text_fields, "experts")
    tied = bool(text_fields.get("tie_word_embeddings", kind in _LEARNED_POSITION_TYPES))
    positions = (
        (read_optional_size(text_fields, "max_position_embeddings") or 2048) if kind in _LEARNED_POSITION_TYPES else 0
    )
    table = vocab * hidden
    embeddings = table * (1 if tied else 2) + positions * hidden
    norm = hidden * (2 if kind in _UNGATED_MLP_TYPES else 1)
    head_bias = vocab if text_fields.get("lm_head_bias") and not tied else 0
    # Recurrent layers are counted as if they were attention.
    body = layers * (attention + 2 * norm) + (layers - sparse) * dense + sparse * (experts * (expert + router) + shared)
    head = kv if caches_latents else _head_dim(text_fields, hidden)
    return DecoderSizes(
        num_layers=layers,
        vocab_size=vocab,
        hidden_size=hidden,
        num_parameters=embeddings + body + norm + head_bias,
        embedding_parameters=embeddings,
        dense_parameters=table + body + norm + head_bias - sparse * experts * expert,
        num_experts=experts if sparse else 0,
        experts_per_token=read_optional_size(text_fields, "experts_per_token"),
        expert_parameters=sparse * experts * expert,
        head_parameters=table,
        kv_formula=f"{formula} x {len(windows)} layers",
        num_heads=read_required_size(text_fields, "num_attention_heads"),
        num_kv_heads=1 if caches_latents else _num_kv_heads(text_fields),
        head_dim=head,
        attention_width=width * len(windows),
        layer_cache_specs=tuple((attention_kv_cache_spec(kv, head, window),) for window in windows),
    )


def unknown_state_notes(text_fields: Mapping[str, Any]) -> list[str]:
    layers = read_required_size(text_fields, "num_hidden_layers")
    others = layers - len(unserved_layer_windows(text_fields, layers))
    notes = [f"{others} layers keep a state instead of keys; it is not counted"] if others > 0 else []
    if any(key.startswith("mamba_") for key in text_fields):
        notes.append("these state-space layers are unknown here: their parameter count is an estimate")
    return notes


def _caches_latents(raw: Mapping[str, Any], text_fields: Mapping[str, Any]) -> bool:
    """Transformers' classes cache expanded keys and values."""
    return bool(text_fields.get("kv_lora_rank")) and (
        has_quire_family(raw) or class_rejection_reason(text_fields) is not None
    )


def _count_attention(text_fields: Mapping[str, Any], hidden: int, *, caches_latents: bool) -> tuple[int, int, str, int]:
    """Per layer: parameters, cached values per token, their formula, and query heads times head size."""
    heads = read_required_size(text_fields, "num_attention_heads")
    if kv_rank := text_fields.get("kv_lora_rank"):
        rope, nope, value = (
            _read_required_mla_dim(text_fields, key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        q_rank = text_fields.get("q_lora_rank")
        query = heads * (rope + nope)
        parameters = hidden * q_rank + q_rank + q_rank * query if q_rank else hidden * query
        parameters += hidden * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + value) + heads * value * hidden
        parameters += int(q_rank or 0) + kv_rank + rope + hidden if text_fields.get("attention_bias") else 0
        width = heads * (rope + nope + value) // 2
        if caches_latents:
            return parameters, kv_rank + rope, f"({kv_rank} latent + {rope} rope)", width
        widest = max(rope + nope, value)
        return parameters, 2 * heads * widest, f"2 x {heads} heads x {widest} (latents are expanded)", width
    kv_heads, head_size = _num_kv_heads(text_fields), _head_dim(text_fields, hidden)
    if head_size < 1:
        raise ModelError(f"model: config.json: hidden_size: {hidden} cannot be split into {heads} heads")
    parameters = 2 * hidden * heads * head_size + 2 * hidden * kv_heads * head_size
    has_bias = any(text_fields.get(name) for name in ("attention_bias", "use_bias", "use_qkv_bias", "enable_bias"))
    if has_bias:
        parameters += heads * head_size + 2 * kv_heads * head_size + hidden
    parameters += hidden if text_fields.get("attention_out_bias") else 0
    parameters += (heads + kv_heads) * head_size if text_fields.get("use_qk_norm") else 0
    return parameters, 2 * kv_heads * head_size, f"2 x {kv_heads} heads x {head_size}", heads * head_size


def _head_dim(text_fields: Mapping[str, Any], hidden: int) -> int:
    return int(
        text_fields.get("head_dim")
        or text_fields.get("kv_channels")
        or hidden // read_required_size(text_fields, "num_attention_heads")
    )


def _num_kv_heads(text_fields: Mapping[str, Any]) -> int:
    if text_fields.get("multi_query") and not text_fields.get("new_decoder_architecture"):
        return 1
    kv_heads = text_fields.get("num_key_value_heads") or text_fields.get("num_kv_heads")
    return kv_heads if isinstance(kv_heads, int) else read_required_size(text_fields, "num_attention_heads")


def _count_mlp(text_fields: Mapping[str, Any], hidden: int, num_layers: int) -> tuple[int, int, int, int, int]:
    """Return parameters of a dense MLP, an expert, the router per expert, and shared experts; then the number of MoE
    layers.
    """
    kind = text_fields.get("model_type")
    linears = 2 if kind in _UNGATED_MLP_TYPES else 3
    mlp_width = read_optional_size(text_fields, "intermediate_size") or int(
        (text_fields.get("expansion_ratio") or 4) * hidden
    )
    has_bias = any(text_fields.get(name) for name in ("mlp_bias", "use_bias", "enable_bias"))
    dense = linears * hidden * int(text_fields.get("intermediate_size_mlp") or mlp_width)
    dense += ((linears - 1) * mlp_width + hidden) if has_bias else 0
    if read_optional_size(text_fields, "experts") < 2:
        return dense, 0, 0, 0, 0
    width = text_fields.get("moe_intermediate_size")
    width = width if isinstance(width, int) else mlp_width
    shared_width = shared_expert_width(text_fields)
    shared = 3 * hidden * shared_width + (2 * shared_width + hidden if has_bias and shared_width else 0)
    return dense, 3 * hidden * width, hidden, shared, sum(moe_layer_mask(text_fields, num_layers))


def _read_required_mla_dim(text_fields: Mapping[str, Any], key: str) -> int:
    if text_fields.get(key) is None:
        raise ModelError(f"model: config.json lacks {key}, needed to know the size of latent attention")
    return int(text_fields[key])


def read_optional_size(text_fields: Mapping[str, Any], name: str) -> int:
    """`name` is a key of SIZE_FIELD_ALIASES. 0 if missing."""
    return next((int(text_fields[key]) for key in SIZE_FIELD_ALIASES[name] if isinstance(text_fields.get(key), int)), 0)


def read_required_size(text_fields: Mapping[str, Any], name: str) -> int:
    """Raises ModelError if missing."""
    value = read_optional_size(text_fields, name)
    if value < 1:
        raise ModelError(f"model: config.json lacks {name}, needed to know the size of a decoder")
    return value
