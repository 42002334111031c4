"""How families' checkpoints differ from Llama's: tensors have other names, are several in one, or have their rows in
another order. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.engine.architecture.rope import rotated_size
from quire.engine.checkpoint.fields import OneRope
from quire.engine.checkpoint.parts.shared_blocks import MOST_USES

LAYER = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.(.+)")
"""A module of a layer in any family's checkpoint: the layer's number, and what it is there."""
PREFIX = re.compile(r"^(?:model\.decoder|backbone|decoder|model|transformer|gpt_neox)\.")
"""What names beside the layers begin with."""
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_BCX = ("conv.b_proj", "conv.c_proj", "conv.x_proj")

_Inside = Mapping[str, str | tuple[str, ...]]


def _delta(names: str) -> tuple[str, ...]:
    """What a delta net projects, by the last letters."""
    return tuple(f"linear_attn.in_proj_{name}" for name in names)


@dataclass(frozen=True, slots=True)
class Layout:
    outside: Mapping[str, str] = field(default_factory=dict)
    """Modules beside the layers, without what names begin with, to their names here."""
    inside: _Inside = field(default_factory=dict)
    """The same of a layer's; several names: it is these in one, outputs after outputs."""
    by_groups: bool = False
    """Queries, keys and values in one: the heads of a group side by side, its queries, its key, its value. What delta
    nets project: of each key head side by side."""
    transposed: tuple[str, ...] = ()
    """Modules of a layer whose weights are [in, out]."""
    neighbours: bool = False
    """Rotations turn neighbours of a head's numbers, not its halves."""
    unused: tuple[str, ...] = ()
    """Tensors of a layer that are no weights."""
    before_positions: int = 0
    """Rows of the table of positions that no position has."""


JOINED = {"self_attn.qkv_proj": _QKV, "mlp.gate_up_proj": _GATE_UP, "conv.in_proj": _BCX}
"""What GGUF files of any family may have in one, by the names of engine/gguf/tensor_names.py."""
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
_LFM3 = Layout(
    outside=_LFM2.outside,
    inside={
        **{name: own for name, own in _LFM2.inside.items() if not name.startswith("self_attn.")},
        "post_operator_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffn_norm": "post_feedforward_layernorm",
        "self_attn.g_proj": "self_attn.gate_proj",
    },
)

_GATED_QUERY = {"self_attn.q_proj": ("self_attn.q_proj", "self_attn.gate_proj")}
"""Each head's query and its gate."""
_QWEN3_5 = Layout(inside={**_GATED_QUERY, "linear_attn.in_proj_qkv": _delta("qkv")})

_SPACE = tuple(f"mamba.in_proj_{name}" for name in ("z", "x", "b", "c", "dt"))
"""What a state space projects."""
_BAMBA = Layout(
    outside={"final_layernorm": "norm"},
    inside={
        "mamba.in_proj": _SPACE,
        "pre_ff_layernorm": "post_attention_layernorm",
        **{f"feed_forward.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    },
)
_SCAN: _Inside = {
    "mamba.in_proj": ("mamba.in_proj_x", "mamba.in_proj_z"),
    "mamba.x_proj": ("mamba.x_proj_dt", "mamba.x_proj_b", "mamba.x_proj_c"),
}
"""The same of a selective scan."""
_ALONE = {"embedding": "embed_tokens", "embeddings": "embed_tokens", "norm_f": "norm"}
_MIXER: _Inside = {
    "norm": "input_layernorm",
    "mixer": "mamba",
    "mixer.in_proj": _SPACE,
    **{f"mixer.{name}": f"mamba.{name}" for name in ("conv1d", "norm", "out_proj")},
}
_MAMBA = Layout(
    outside=_ALONE,
    inside={
        "norm": "input_layernorm",
        "mixer": "mamba",
        **{name.replace("mamba.", "mixer."): own for name, own in _SCAN.items()},
        **{f"mixer.{name}": f"mamba.{name}" for name in ("conv1d", "dt_proj", "out_proj")},
    },
)
_NEMOTRON_H: _Inside = {
    **_MIXER,
    **{f"mixer.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"mixer.{name}_proj": f"mlp.{name}_proj" for name in ("up", "down")},
}

_BLOCK = "shared_transformer"
_HALVES = (f"{_BLOCK}.feed_forward.gate_proj", f"{_BLOCK}.feed_forward.up_proj")
_ZAMBA2: _Inside = {
    "mamba.in_proj": _SPACE,
    "mamba_decoder.mamba.in_proj": tuple(f"mamba_decoder.{name}" for name in _SPACE),
    f"{_BLOCK}.pre_ff_layernorm": f"{_BLOCK}.post_attention_layernorm",
    f"{_BLOCK}.feed_forward.gate_up_proj": _HALVES,
    **{
        f"{own}.1": (f"{own}.1.gate", f"{own}.1.up")
        for own in (f"{_BLOCK}.feed_forward.gate_up_proj_adapter_list.{use}" for use in range(MOST_USES))
    },
}

LAYOUTS: Mapping[str, Layout] = {
    "apertus": Layout(
        inside={"attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm"},
        unused=("mlp.act_fn.eps",),
    ),
    "bamba": _BAMBA,
    "bloom": Layout(
        outside={"word_embeddings": "embed_tokens", "word_embeddings_layernorm": "embed_norm", "ln_f": "norm"},
        inside=_MEGATRON_INSIDE,
        by_groups=True,
    ),
    "cohere": Layout(neighbours=True),
    "cohere2": Layout(neighbours=True),
    "ernie4_5": Layout(neighbours=True),
    "ernie4_5_moe": Layout(neighbours=True),
    "falcon_h1": _BAMBA,
    "falcon_mamba": _MAMBA,
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
    "granitemoehybrid": Layout(inside={**_GRANITE_MOE.inside, "mamba.in_proj": _SPACE}),
    "granitemoeshared": _GRANITE_MOE,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "lfm3": _LFM3,
    "llama4_text": Layout(
        inside={f"feed_forward.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")}, neighbours=True
    ),
    "jamba": Layout(
        outside=_BAMBA.outside, inside={**{name: own for name, own in _BAMBA.inside.items() if own != _SPACE}, **_SCAN}
    ),
    "mamba": _MAMBA,
    "mamba2": Layout(outside=_ALONE, inside=_MIXER),
    "nemotron_h": Layout(outside=_ALONE, inside=_NEMOTRON_H),
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
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_next": Layout(
        inside={**_GATED_QUERY, "linear_attn.in_proj_qkvz": _delta("qkvz"), "linear_attn.in_proj_ba": _delta("ba")},
        by_groups=True,
    ),
    "zamba2": Layout(outside=_BAMBA.outside, inside=_ZAMBA2),
    "starcoder2": Layout(inside={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
}
"""By config.json's model_type; a family that is not here has Llama's names."""


def rope_of_layers(said: OneRope | None, theta: float, positions: int | None) -> dict[str, Any]:
    """The rotation of one kind of layers, as its own object says it, in the form of ModelConfig.rope. theta: where that
    has none; positions: the model's."""
    rope: dict[str, Any] = {"rope_theta": theta}
    rope |= {key: value for key, value in (said or {}).items() if value is not None}
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    if rope["rope_type"] in ("llama3", "yarn") and positions is not None:
        rope.setdefault("original_max_position_embeddings", positions)
    return rope


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
    if not gguf:
        return layout
    delta = _QWEN3_5.inside if any("linear_attn" in name for name in layout.inside) else {}
    pairs = [(name.rpartition(".")[2], own) for name, own in layout.inside.items() if isinstance(own, tuple)]
    space = {f"mamba.{name}": own for name, own in pairs if own[0].startswith("mamba.")}
    return Layout(inside={**JOINED, **delta, **space}, neighbours=layout.neighbours)


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
