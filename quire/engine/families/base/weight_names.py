"""How a family's checkpoints differ from Llama's: tensors have other names, are several in one, or have their rows in
another order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.engine.architecture.rope import rotated_size

LAYER_MODULE_PATTERN = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.(.+)")
"""A module of a layer in any family's checkpoint: the layer's number, and what it is there."""
MODEL_PREFIX_PATTERN = re.compile(r"^(?:model\.decoder|backbone|decoder|model|transformer|gpt_neox)\.")
"""What names beside the layers begin with."""
LayerModules = Mapping[str, str | tuple[str, ...]]
QKV_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP_PROJECTIONS = ("mlp.gate_proj", "mlp.up_proj")
SHORT_CONV_PROJECTIONS = ("conv.b_proj", "conv.c_proj", "conv.x_proj")
FUSED_MODULES: LayerModules = {
    "self_attn.qkv_proj": QKV_PROJECTIONS,
    "mlp.gate_up_proj": GATE_UP_PROJECTIONS,
    "conv.in_proj": SHORT_CONV_PROJECTIONS,
}
"""What files of several families have in one; GGUF files of any family may."""
GATED_QUERY_MODULES: LayerModules = {"self_attn.q_proj": ("self_attn.q_proj", "self_attn.gate_proj")}
"""For each head the rows of its query, then those of its output gate."""


def delta_net_projections(letters: str) -> tuple[str, ...]:
    """What a gated delta net projects, by the last letters of the modules' names."""
    return tuple(f"linear_attn.in_proj_{letter}" for letter in letters)


GATED_DELTA_NET_MODULES: LayerModules = {**GATED_QUERY_MODULES, "linear_attn.in_proj_qkv": delta_net_projections("qkv")}
FEED_FORWARD_MODULES: LayerModules = {
    f"feed_forward.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")
}
"""An MLP by the name that Llama 4 and others have for it."""


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """How all experts of a layer are in one tensor. Each expert's is [inputs, outputs], and gate and up take turns in
    the outputs, as in gpt-oss's files, where nothing else is said."""

    gate_up_halves: bool = False
    """Gate and up are the halves of the outputs."""
    always_transposed: bool = False
    """Of halves: [inputs, outputs] instead of [outputs, inputs]."""
    maybe_transposed: bool = False
    """Of halves: they may be either, and their shape says which."""


@dataclass(frozen=True, slots=True)
class WeightNames:
    model_modules: Mapping[str, str] = field(default_factory=dict)
    """Modules beside the layers, without what names begin with, to Llama's names."""
    layer_modules: LayerModules = field(default_factory=dict)
    """The same of a layer's modules. Several names: the checkpoint's tensor has the rows of these linears, those of the
    first, then those of the second; of GATED_QUERY, and where `is_fused_by_kv_head` says so, head by head instead."""
    is_fused_by_kv_head: bool = False
    """A fused tensor of queries, keys and values has for each key-value head the rows of its queries, then of its key,
    then of its value (GPT-NeoX's order); a fused tensor of a delta net has for each key head the rows of all parts."""
    transposed_modules: tuple[str, ...] = ()
    """Modules of a layer whose weights are [in, out]."""
    has_interleaved_rope: bool = False
    """Rotations turn neighbours of a head's numbers, not its halves."""
    unused_tensors: tuple[str, ...] = ()
    """Tensors of a layer that are no weights."""
    position_offset: int = 0
    """Rows of the table of positions that no position has."""
    stacked_experts: StackedExperts | None = None
    """None: each expert has tensors of its own."""

    def gguf_weight_names(self) -> WeightNames:
        """Of the family's GGUF files, whose tensors have Llama's names but for what is fused."""
        has_delta_net = any("linear_attn" in name for name in self.layer_modules)
        recurrent = {
            f"mamba.{name.rpartition('.')[2]}": own
            for name, own in self.layer_modules.items()
            if isinstance(own, tuple) and own[0].startswith("mamba.")
        }
        modules = {**FUSED_MODULES, **(GATED_DELTA_NET_MODULES if has_delta_net else {}), **recurrent}
        return WeightNames(layer_modules=modules, has_interleaved_rope=self.has_interleaved_rope)

    def model_module(self, name: str) -> str | None:
        """Llama's name of a module beside the layers."""
        return self.model_modules.get(MODEL_PREFIX_PATTERN.sub("", name))

    def modules_from_checkpoint(self, name: str) -> tuple[str, ...]:
        """What a checkpoint's module is here."""
        if (match := LAYER_MODULE_PATTERN.fullmatch(name)) is None:
            llama_name = self.model_module(name)
            return (name if llama_name is None else llama_name if llama_name == "lm_head" else f"model.{llama_name}",)
        layer_module = self.layer_modules.get(match[2], match[2])
        modules = (layer_module,) if isinstance(layer_module, str) else layer_module
        return tuple(f"model.layers.{match[1]}.{each}" for each in modules)

    def module_in_checkpoint(self, name: str) -> str:
        """What a checkpoint calls a linear of a layer, or what it is part of, by its name here."""
        if (match := LAYER_MODULE_PATTERN.fullmatch(name)) is None:
            return name
        for stored, modules in self.layer_modules.items():
            if match[2] == modules or (isinstance(modules, tuple) and match[2] in modules):
                return f"model.layers.{match[1]}.{stored}"
        return name


def rope_head_permutation(rope: Mapping[str, Any], head_dim: int, *, interleaved: bool) -> list[int] | None:
    """Which of a stored head's numbers stands where, so that rotations turn number i with i + head_dim / 2; None: each
    where it is. What is not rotated stands behind what is, in both halves."""
    size = rotated_size(rope, head_dim)
    rotated, unrotated = list(range(size)), list(range(size, head_dim))
    first, second = (rotated[::2], rotated[1::2]) if interleaved else (rotated[: size // 2], rotated[size // 2 :])
    order = [*first, *unrotated[: len(unrotated) // 2], *second, *unrotated[len(unrotated) // 2 :]]
    return None if order == sorted(order) else order
