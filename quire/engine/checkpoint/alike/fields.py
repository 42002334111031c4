"""Fields of config.json that have other names than Llama's, or mean something else where they are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.engine.checkpoint.alike import latents, selective_scans, state_spaces
from quire.engine.checkpoint.alike.left_out import left_out
from quire.engine.checkpoint.families import DELTA_NETS, SELECTIVE_SCANS, STATE_SPACES
from quire.engine.checkpoint.fields import MAX_LAYERS
from quire.engine.checkpoint.parts import unequal
from quire.engine.checkpoint.parts.inner_fields import MAX_WIDTH

_GPT2_FIELDS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
_CENTRED = {"layer_norm_eps": "rms_norm_eps"}
_ROUTED = {"n_routed_experts": "num_local_experts", "num_mtp_layers": "num_nextn_predict_layers"}
_MEGATRON_FIELDS = {
    **_GPT2_FIELDS,
    "n_embed": "hidden_size",
    "num_kv_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "activation": "hidden_act",
    "bias": "use_bias",
}
OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    **selective_scans.OTHER_NAMES,
    **state_spaces.OTHER_NAMES,
    "bloom": _MEGATRON_FIELDS,
    "cohere": _CENTRED,
    "cohere2": _CENTRED,
    "deepseek_v2": _ROUTED,
    "deepseek_v3": _ROUTED,
    "distilbert": {
        "dim": "hidden_size",
        "hidden_dim": "intermediate_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
    },
    "dots1": _ROUTED,
    "ernie4_5_moe": {
        "moe_num_experts": "num_experts",
        "moe_k": "num_experts_per_tok",
        "moe_num_shared_experts": "n_shared_experts",
        "moe_layer_start_index": "first_k_dense_replace",
        "moe_layer_interval": "decoder_sparse_step",
    },
    "exaone_moe": {"num_shared_experts": "n_shared_experts"},
    "falcon": _MEGATRON_FIELDS,
    "gemma4_text": {"top_k_experts": "num_experts_per_tok"},
    "glm4_moe": _ROUTED,
    "glm4_moe_lite": _ROUTED,
    "kimi_k2": _ROUTED,
    "gpt2": _GPT2_FIELDS,
    "gpt_bigcode": _GPT2_FIELDS,
    "gpt_neox": {**_CENTRED, "rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"},
    "gptj": _GPT2_FIELDS,
    "hunyuan_v1_moe": {"moe_topk": "num_experts_per_tok"},
    "lfm2": {
        "norm_eps": "rms_norm_eps",
        "tie_embedding": "tie_word_embeddings",
        "block_ff_dim": "intermediate_size",
    },
    "lfm2_moe": {
        "norm_eps": "rms_norm_eps",
        "tie_embedding": "tie_word_embeddings",
        "num_dense_layers": "first_k_dense_replace",
    },
    "lfm3": {"norm_eps": "rms_norm_eps"},
    "mellum": {"num_mtp_layers": "num_nextn_predict_layers"},
    "mpt": {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    "nemotron": {"norm_eps": "rms_norm_eps"},
    "nomic_bert": {
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_positions": "max_position_embeddings",
    },
    "opt": {"ffn_dim": "intermediate_size", "activation_function": "hidden_act"},
    "phi": _CENTRED,
    "solar_open": _ROUTED,
    "stablelm": _CENTRED,
    "starcoder2": {"norm_epsilon": "rms_norm_eps"},
}
"""By model_type: fields of config.json that have other names there."""

_FOUR_TIMES = ("bloom", "falcon", "gpt2", "gpt_bigcode", "gptj", "mpt")
"""Families whose MLPs are four times as wide as the hidden states, where config.json does not say."""
_BY_LAYER = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_ONE_KEY = ("falcon", "gpt_bigcode")
"""Those with a key and a value for all heads, where multi_query says so."""


def named_alike(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json, or of its text part, by Llama's names, with what it leaves out."""
    kind = str(raw.get("model_type"))
    found = dict(raw)
    for other, name in OTHER_NAMES.get(kind, {}).items():
        if found.get(other) is not None:
            found[name] = found[other]
    found |= left_out(kind, found)
    for kinds, complete in _COMPLETIONS:
        if kind in kinds:
            complete(found)
    if found.get("kv_lora_rank"):
        latents.complete(found)
    if kind in _ONE_KEY and found.get("multi_query") and not found.get("new_decoder_architecture"):
        found["num_key_value_heads"] = 1
    return found


def _unite_layers(found: dict[str, Any]) -> None:
    """Some fields of a Hunyuan are lists, by layer."""
    found |= {name: each[0] for name, each in found.items() if name in _BY_LAYER and _is_of_one(each)}


def _is_of_one(value: Any) -> bool:
    """Whether it is a list of equal numbers."""
    return isinstance(value, list) and len(value) > 0 and all(each == value[0] for each in value)


def _complete_mlp_width(found: dict[str, Any]) -> None:
    """Where config.json does not say how wide MLPs are, they are four times as wide as the hidden states."""
    hidden = found.get("hidden_size")
    if found.get("intermediate_size") is None and isinstance(hidden, int):
        times = found.get("expansion_ratio", 4)
        found["intermediate_size"] = int(times * hidden) if isinstance(times, int | float) and 0 < times < 1e6 else None


def _complete_mellum(found: dict[str, Any]) -> None:
    """Where config.json does not say what layers are, all attend to all tokens."""
    layers = found.get("num_hidden_layers")
    if not found.get("layer_types") and isinstance(layers, int):
        found["layer_types"] = ["full_attention"] * min(layers, MAX_LAYERS)


def _complete_layer_types(found: dict[str, Any]) -> None:
    """Where config.json does not say which layers have attention, it says how many of them one has it."""
    layers, every = found.get("num_hidden_layers"), found.get("full_attention_interval") or 4
    if (
        not found.get("layer_types")
        and isinstance(layers, int)
        and isinstance(every, int)
        and 1 <= layers <= MAX_LAYERS
    ):
        kinds = ("full_attention", "linear_attention")
        found["layer_types"] = [kinds[layer % every != 0] for layer in range(1, layers + 1)]


def _complete_lfm3(found: dict[str, Any]) -> None:
    """Where config.json does not say what layers are, of four one attends to all tokens, one to the last ones."""
    layers = found.get("num_hidden_layers")
    if not found.get("layer_types") and isinstance(layers, int) and 1 <= layers <= MAX_LAYERS:
        kinds = ("sliding_attention", "conv", "full_attention", "conv")
        found["layer_types"] = [kinds[layer % 4] if layer else "conv" for layer in range(layers)]


def _complete_llama4(found: dict[str, Any]) -> None:
    """Where config.json does not say what layers are, those attend within chunks whose positions are rotated."""
    layers, every, given = (
        found.get(name) for name in ("num_hidden_layers", "no_rope_layer_interval", "no_rope_layers")
    )
    every = every or 4
    if found.get("layer_types") or not isinstance(layers, int) or not 1 <= layers <= MAX_LAYERS:
        return
    if isinstance(every, int) and every >= 1:
        rotated = given if isinstance(given, list) and given else [(layer + 1) % every != 0 for layer in range(layers)]
        found["layer_types"] = ["chunked_attention" if each else "full_attention" for each in rotated]


def _complete_lfm2(found: dict[str, Any]) -> None:
    """What an LFM2's fields say of its layers and of its MLPs, by the names of other families."""
    layers, attending = found.get("num_hidden_layers"), found.get("full_attn_idxs")
    if not found.get("layer_types") and isinstance(layers, int) and 1 <= layers <= MAX_LAYERS:
        attending = range(layers) if attending is None else attending
        if isinstance(attending, list | range):
            found["layer_types"] = ["full_attention" if layer in attending else "conv" for layer in range(layers)]
    width, unit = found.get("intermediate_size"), found.get("block_multiple_of") or 256
    factor = found.get("block_ffn_dim_multiplier") or 1.0
    if not isinstance(width, int) or not isinstance(unit, int) or not isinstance(factor, int | float):
        return
    if found.get("block_auto_adjust_ff_dim") is False or found["model_type"] == "lfm2_moe":
        return
    if 1 <= width <= MAX_WIDTH and 1 <= unit <= MAX_WIDTH and 0 < factor < 1e6:
        found["intermediate_size"] = -(-int(factor * int(2 * width / 3)) // unit) * unit
        found["block_auto_adjust_ff_dim"] = False


_COMPLETIONS: tuple[tuple[tuple[str, ...], Callable[[dict[str, Any]], None]], ...] = (
    (("hunyuan_v1_moe",), _unite_layers),
    (_FOUR_TIMES, _complete_mlp_width),
    (("lfm2", "lfm2_moe"), _complete_lfm2),
    (("lfm3",), _complete_lfm3),
    (("llama4_text",), _complete_llama4),
    (DELTA_NETS, _complete_layer_types),
    (("mellum",), _complete_mellum),
    (unequal.KINDS, unequal.complete),
    (STATE_SPACES, state_spaces.complete),
    (SELECTIVE_SCANS, selective_scans.complete),
)
"""Families, and what puts into their config.json's content what it leaves out; in this order."""
