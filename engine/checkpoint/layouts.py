"""How families' files differ from Llama's: fields of config.json that have other names or are left out, tensors that
have other names, are several in one, or have their rows in another order. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.engine.checkpoint.fields import MAX_LAYERS, MAX_WIDTH
from quire.engine.checkpoint.left_out import LEFT_OUT
from quire.engine.checkpoint.left_out.latents import complete
from quire.engine.errors import ModelError

LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.(.+)")
"""A module of a layer in any family's checkpoint: the layer's number, and what it is there."""
PREFIX = re.compile(r"^(?:model\.decoder|decoder|model|transformer|gpt_neox)\.")
"""What names beside the layers begin with."""
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_BCX = ("conv.b_proj", "conv.c_proj", "conv.x_proj")

_Inside = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Layout:
    outside: Mapping[str, str] = field(default_factory=dict)
    """Modules beside the layers, without what names begin with, to their names here."""
    inside: _Inside = field(default_factory=dict)
    """The same of a layer's; several names: it is these in one, outputs after outputs."""
    by_groups: bool = False
    """Queries, keys and values in one: the heads of a group side by side, its queries, its key, its value."""
    transposed: tuple[str, ...] = ()
    """Modules of a layer whose weights are [in, out]."""
    neighbours: bool = False
    """Rotations turn neighbours of a head's numbers, not its halves."""
    unused: tuple[str, ...] = ()
    """Tensors of a layer that are no weights."""
    before_positions: int = 0
    """Rows of the table of positions that no position has."""


JOINED = {"self_attn.qkv_proj": _QKV, "mlp.gate_up_proj": _GATE_UP, "conv.in_proj": _BCX}
"""What GGUF files of any family may have in one, by the names of engine/gguf/names.py."""
_GPT2_NAMES = {"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": "norm"}
_GPT2_BUFFERS = ("attn.bias", "attn.masked_bias")
_GPT2_INSIDE: _Inside = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_attn": _QKV,
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
_MEGATRON_MLP = {"mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj"}
_MEGATRON_INSIDE: _Inside = {
    **_MEGATRON_MLP,
    "self_attention.query_key_value": _QKV,
    "self_attention.dense": "self_attn.o_proj",
    "ln_attn": "input_layernorm",
    "ln_mlp": "post_attention_layernorm",
}
_GRANITE_MOE = Layout(
    inside={
        "shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj"),
        "shared_mlp.output_linear": "shared_mlp.down_proj",
        "block_sparse_moe.router": "block_sparse_moe.router.layer",
    }
)
_HUNYUAN = Layout(
    inside={"self_attn.query_layernorm": "self_attn.q_norm", "self_attn.key_layernorm": "self_attn.k_norm"}
)
_LFM2 = Layout(
    outside={"embedding_norm": "norm"},
    inside={
        "operator_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
        "self_attn.out_proj": "self_attn.o_proj",
        "conv.in_proj": _BCX,
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
    },
)

LAYOUTS: Mapping[str, Layout] = {
    "apertus": Layout(
        inside={"attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm"},
        unused=("mlp.act_fn.eps",),
    ),
    "bloom": Layout(
        outside={"word_embeddings": "embed_tokens", "word_embeddings_layernorm": "embed_norm", "ln_f": "norm"},
        inside=_MEGATRON_INSIDE,
        by_groups=True,
    ),
    "cohere": Layout(neighbours=True),
    "cohere2": Layout(neighbours=True),
    "ernie4_5": Layout(neighbours=True),
    "ernie4_5_moe": Layout(neighbours=True),
    "falcon": Layout(
        outside={"word_embeddings": "embed_tokens", "ln_f": "norm"}, inside=_MEGATRON_INSIDE, by_groups=True
    ),
    "glm": Layout(inside={"mlp.gate_up_proj": _GATE_UP}, neighbours=True),
    "glm4": Layout(
        inside={
            "mlp.gate_up_proj": _GATE_UP,
            "post_self_attn_layernorm": "post_attention_layernorm",
            "post_attention_layernorm": "pre_feedforward_layernorm",
            "post_mlp_layernorm": "post_feedforward_layernorm",
        },
        neighbours=True,
    ),
    "gpt2": Layout(
        outside=_GPT2_NAMES,
        inside=_GPT2_INSIDE,
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        unused=_GPT2_BUFFERS,
    ),
    "gpt_bigcode": Layout(outside=_GPT2_NAMES, inside=_GPT2_INSIDE, by_groups=True, unused=_GPT2_BUFFERS),
    "gpt_neox": Layout(
        outside={"embed_in": "embed_tokens", "final_layer_norm": "norm", "embed_out": "lm_head"},
        inside={**_MEGATRON_MLP, "attention.query_key_value": _QKV, "attention.dense": "self_attn.o_proj"},
        by_groups=True,
        unused=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
    ),
    "gptj": Layout(
        outside={"wte": "embed_tokens", "ln_f": "norm"},
        inside={
            **{f"attn.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
            "attn.out_proj": "self_attn.o_proj",
            "ln_1": "input_layernorm",
            "mlp.fc_in": "mlp.up_proj",
            "mlp.fc_out": "mlp.down_proj",
        },
        neighbours=True,
        unused=(*_GPT2_BUFFERS, "attn.embed_positions"),
    ),
    "helium": Layout(neighbours=True),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "granitemoe": _GRANITE_MOE,
    "granitemoe_swa": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "mpt": Layout(
        outside={"wte": "embed_tokens", "norm_f": "norm"},
        inside={
            "norm_1": "input_layernorm",
            "norm_2": "post_attention_layernorm",
            "attn.Wqkv": _QKV,
            "attn.out_proj": "self_attn.o_proj",
            "ffn.up_proj": "mlp.up_proj",
            "ffn.down_proj": "mlp.down_proj",
        },
    ),
    "opt": Layout(
        outside={"embed_tokens": "embed_tokens", "embed_positions": "embed_positions", "final_layer_norm": "norm"},
        inside={
            "self_attn_layer_norm": "input_layernorm",
            "final_layer_norm": "post_attention_layernorm",
            "self_attn.out_proj": "self_attn.o_proj",
            "fc1": "mlp.up_proj",
            "fc2": "mlp.down_proj",
        },
        before_positions=2,
    ),
    "phi": Layout(
        outside={"final_layernorm": "norm"},
        inside={"self_attn.dense": "self_attn.o_proj", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
    ),
    "phi3": Layout(inside=JOINED),
    "starcoder2": Layout(inside={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
}
"""By config.json's model_type; a family that is not here has Llama's names."""

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
    "falcon": _MEGATRON_FIELDS,
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
    left_out = {name: value for name, value in LEFT_OUT.get(kind, {}).items() if found.get(name) is None}
    if found.get("rope_scaling"):
        left_out.pop("rope_parameters", None)
    found |= left_out
    if kind == "hunyuan_v1_moe":  # some of its fields are lists, by layer
        found |= {name: each[0] for name, each in found.items() if name in _BY_LAYER and _is_of_one(each)}
    hidden = found.get("hidden_size")
    if kind in _FOUR_TIMES and found.get("intermediate_size") is None and isinstance(hidden, int):
        times = found.get("expansion_ratio", 4)
        found["intermediate_size"] = int(times * hidden) if isinstance(times, int | float) and 0 < times < 1e6 else None
    if kind in ("lfm2", "lfm2_moe"):
        _complete_lfm2(found)
    if found.get("kv_lora_rank"):
        complete(found)
    if kind in _ONE_KEY and found.get("multi_query") and not found.get("new_decoder_architecture"):
        found["num_key_value_heads"] = 1
    return found


def _is_of_one(value: Any) -> bool:
    """Whether it is a list of equal numbers."""
    return isinstance(value, list) and len(value) > 0 and all(each == value[0] for each in value)


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


def rotated_size(rope: Mapping[str, Any], head_dim: int) -> int:
    """Numbers of a head that are rotated, the first ones. Raises ModelError."""
    size = rope.get("rotary_dim") or int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    if not 2 <= size <= head_dim or size % 2:
        raise ModelError(f"model: config.json: {size} of a head's {head_dim} numbers cannot be rotated")
    return int(size)


def head_order(rope: Mapping[str, Any], head_dim: int, *, neighbours: bool) -> list[int] | None:
    """Which of a stored head's numbers stands where, so that rotations turn number i with i + head_dim / 2; None: each
    where it is. What is not rotated stands behind what is, in both halves."""
    size = rotated_size(rope, head_dim)
    turned, kept = list(range(size)), list(range(size, head_dim))
    first, second = (turned[::2], turned[1::2]) if neighbours else (turned[: size // 2], turned[size // 2 :])
    order = [*first, *kept[: len(kept) // 2], *second, *kept[len(kept) // 2 :]]
    return None if order == sorted(order) else order


def layout_of(kind: str, *, gguf: bool = False) -> Layout:
    """Of a family's checkpoints, or of its GGUF files, whose tensors come by the names here but for what is joined."""
    layout = LAYOUTS.get(kind, Layout())
    return Layout(inside=JOINED, neighbours=layout.neighbours) if gguf else layout


def stored_module(layout: Layout, name: str) -> str:
    """What a checkpoint calls a linear of a layer, or what it is part of, by its name here."""
    if (place := LAYER.fullmatch(name)) is None:
        return name
    for stored, own in layout.inside.items():
        if place[2] == own or (isinstance(own, tuple) and place[2] in own):
            return f"model.layers.{place[1]}.{stored}"
    return name


def own_modules(layout: Layout, name: str) -> tuple[str, ...]:
    """What a checkpoint's module is here."""
    if (place := LAYER.fullmatch(name)) is None:
        known = layout.outside.get(PREFIX.sub("", name))
        return (name if known is None else known if known == "lm_head" else f"model.{known}",)
    inside = layout.inside.get(place[2], place[2])
    return tuple(f"model.layers.{place[1]}.{each}" for each in ((inside,) if isinstance(inside, str) else inside))
