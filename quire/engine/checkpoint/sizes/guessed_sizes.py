"""Sizes of models that no file of ours describes, counted from the fields that most config.json files share:
what transformers' classes compute, and what is not served.

Layers follow Vaswani et al. (2017) with grouped queries (Ainslie et al., 2023), gated MLPs (Shazeer, 2020), mixtures of
experts (Fedus et al., 2021) and latent attention (DeepSeek-V2, 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.engine.architecture.kv_cache_spec import PagedState
from quire.engine.checkpoint.adapted import class_not_served
from quire.engine.checkpoint.config_reader import has_file
from quire.engine.checkpoint.sizes.decoder_sizes import DecoderSizes
from quire.engine.errors import ModelError
from quire.engine.families.base.layer_types import layer_windows
from quire.engine.families.base.moe_fields import shared_expert_width, sparse_layers
from quire.engine.families.base.schema.config_schema import ALIASES

_TWO_LINEARS = {"gpt_neo", "codegen"}
"""Of transformers' classes: those whose MLP has two linears instead of three, and whose norms have biases."""
_GPT2_LIKE = {"gpt_neo"}
"""Those with a table of positions, whose output head is the embedding unless config.json says otherwise."""


def guess_decoder_sizes(raw: Mapping[str, Any], text: Mapping[str, Any]) -> DecoderSizes:
    """`text`: the part of `raw` about the text. Raises ModelError for
    a missing size, which it names."""
    kind = str(text.get("model_type", ""))
    hidden, layers, vocab = (required_size(text, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    windows = layer_windows(text, layers)
    if not windows:
        raise ModelError("model: no layer of it has keys and values to cache, so there is nothing to plan")
    latents = _keeps_latents(raw, text)
    attention, kv, formula, width = _attention_numbers(text, hidden, latents=latents)
    dense, expert, router, shared, sparse = _mlp_numbers(text, hidden, layers)
    experts = optional_size(text, "experts")
    tied = bool(text.get("tie_word_embeddings", kind in _GPT2_LIKE))
    positions = (optional_size(text, "max_position_embeddings") or 2048) if kind in _GPT2_LIKE else 0
    table = vocab * hidden
    embeddings = table * (1 if tied else 2) + positions * hidden
    norm = hidden * (2 if kind in _TWO_LINEARS else 1)
    head_bias = vocab if text.get("lm_head_bias") and not tied else 0
    # Layers that keep another state are counted as if they attended.
    body = layers * (attention + 2 * norm) + (layers - sparse) * dense + sparse * (experts * (expert + router) + shared)
    head = kv if latents else _head_dim(text, hidden)
    return DecoderSizes(
        num_layers=layers,
        vocab_size=vocab,
        parameters=embeddings + body + norm + head_bias,
        embeddings=embeddings,
        experts=experts if sparse else 0,
        experts_per_token=optional_size(text, "experts_per_token"),
        expert_parameters=sparse * experts * expert,
        head_parameters=table,
        kv_formula=f"{formula} x {len(windows)} layers",
        heads=required_size(text, "num_attention_heads"),
        kv_heads=1 if latents else _num_kv_heads(text),
        head_dim=head,
        attention_width=width * len(windows),
        layer_states=tuple((PagedState(kv, window, head),) for window in windows),
    )


def unknown_state_notes(text: Mapping[str, Any]) -> list[str]:
    """What is to be known of layers that keep a state which nothing here knows."""
    layers = required_size(text, "num_hidden_layers")
    others = layers - len(layer_windows(text, layers))
    notes = [f"{others} layers keep a state instead of keys; it is not counted"] if others > 0 else []
    if any(key.startswith("mamba_") for key in text):
        notes.append("state-space layers are not known here: their parameters are a guess")
    return notes


def _keeps_latents(raw: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether latents are cached (DeepSeek-V2, 2024). transformers' classes give keys and values made of them."""
    return bool(text.get("kv_lora_rank")) and (has_file(raw) or class_not_served(text) is not None)


def _attention_numbers(text: Mapping[str, Any], hidden: int, *, latents: bool) -> tuple[int, int, str, int]:
    """One layer's attention.

    Returns its parameters, the numbers it caches per token, a formula for these, and query heads times head size.
    """
    heads = required_size(text, "num_attention_heads")
    if latent := text.get("kv_lora_rank"):
        rope, nope, value = (_latent_size(text, key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        low = text.get("q_lora_rank")
        query = heads * (rope + nope)
        parameters = hidden * low + low + low * query if low else hidden * query
        parameters += hidden * (latent + rope) + latent + latent * heads * (nope + value) + heads * value * hidden
        parameters += int(low or 0) + latent + rope + hidden if text.get("attention_bias") else 0
        width = heads * (rope + nope + value) // 2
        if latents:
            return parameters, latent + rope, f"({latent} latent + {rope} rope)", width
        widest = max(rope + nope, value)
        return parameters, 2 * heads * widest, f"2 x {heads} heads x {widest} (latents are expanded)", width
    kv_heads, size = _num_kv_heads(text), _head_dim(text, hidden)
    if size < 1:
        raise ModelError(f"model: config.json: hidden_size: {hidden} cannot be split into {heads} heads")
    parameters = 2 * hidden * heads * size + 2 * hidden * kv_heads * size
    has_bias = any(text.get(name) for name in ("attention_bias", "use_bias", "use_qkv_bias", "enable_bias"))
    if has_bias:
        parameters += heads * size + 2 * kv_heads * size + hidden
    parameters += hidden if text.get("attention_out_bias") else 0
    parameters += (heads + kv_heads) * size if text.get("use_qk_norm") else 0
    return parameters, 2 * kv_heads * size, f"2 x {kv_heads} heads x {size}", heads * size


def _head_dim(text: Mapping[str, Any], hidden: int) -> int:
    return int(text.get("head_dim") or text.get("kv_channels") or hidden // required_size(text, "num_attention_heads"))


def _num_kv_heads(text: Mapping[str, Any]) -> int:
    """Of a layer: 1 for multi-query models, as many as query heads if config.json names none."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    kv_heads = text.get("num_key_value_heads") or text.get("num_kv_heads")
    return kv_heads if isinstance(kv_heads, int) else required_size(text, "num_attention_heads")


def _mlp_numbers(text: Mapping[str, Any], hidden: int, layers: int) -> tuple[int, int, int, int, int]:
    """Returns the parameters of a dense layer's MLP, of one expert, of the router for one expert, and of a layer's
    shared experts, and the number of layers that have experts."""
    kind = text.get("model_type")
    linears = 2 if kind in _TWO_LINEARS else 3
    inner = optional_size(text, "intermediate_size") or int(text.get("expansion_ratio", 4) * hidden)
    has_bias = any(text.get(name) for name in ("mlp_bias", "use_bias", "enable_bias"))
    dense = linears * hidden * int(text.get("intermediate_size_mlp") or inner)
    dense += ((linears - 1) * inner + hidden) if has_bias else 0
    if optional_size(text, "experts") < 2:
        return dense, 0, 0, 0, 0
    width = text.get("moe_intermediate_size")
    width = width if isinstance(width, int) else inner
    shared_width = shared_expert_width(text)
    shared = 3 * hidden * shared_width + (2 * shared_width + hidden if has_bias and shared_width else 0)
    return dense, 3 * hidden * width, hidden, shared, sum(sparse_layers(text, layers))


def _latent_size(text: Mapping[str, Any], key: str) -> int:
    """Raises ModelError where config.json lacks it."""
    if text.get(key) is None:
        raise ModelError(f"model: config.json lacks {key}, needed to know the size of latent attention")
    return int(text[key])


def optional_size(text: Mapping[str, Any], name: str) -> int:
    """The size that ALIASES lists as `name`; 0 if config.json does not give it."""
    return next((int(text[key]) for key in ALIASES[name] if isinstance(text.get(key), int)), 0)


def required_size(text: Mapping[str, Any], name: str) -> int:
    """The size that ALIASES lists as `name`. Raises ModelError if config.json does not give it."""
    value = optional_size(text, name)
    if value < 1:
        raise ModelError(f"model: config.json lacks {name}, needed to know the size of a decoder")
    return value
