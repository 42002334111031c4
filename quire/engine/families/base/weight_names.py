"""How a family's tensors differ from Llama's: names, fusion, order of rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.engine.architecture.rope import rotated_size

LAYER_MODULE_PATTERN = re.compile(r"(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.(.+)")
"""The groups are the layer's index and the module's name."""
MODEL_PREFIX_PATTERN = re.compile(r"^(?:model\.decoder|backbone|decoder|model|transformer|gpt_neox)\.")
LayerModules = Mapping[str, str | tuple[str, ...]]
QKV_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP_PROJECTIONS = ("mlp.gate_proj", "mlp.up_proj")
SHORT_CONV_PROJECTIONS = ("conv.b_proj", "conv.c_proj", "conv.x_proj")
FUSED_MODULES: LayerModules = {
    "self_attn.qkv_proj": QKV_PROJECTIONS,
    "mlp.gate_up_proj": GATE_UP_PROJECTIONS,
    "conv.in_proj": SHORT_CONV_PROJECTIONS,
}
"""GGUF files of any family may contain fused modules."""
GATED_QUERY_MODULES: LayerModules = {"self_attn.q_proj": ("self_attn.q_proj", "self_attn.gate_proj")}
"""For each head, the rows of its query precede those of its output gate."""


def delta_net_projections(letters: str) -> tuple[str, ...]:
    return tuple(f"linear_attn.in_proj_{letter}" for letter in letters)


GATED_DELTA_NET_MODULES: LayerModules = {**GATED_QUERY_MODULES, "linear_attn.in_proj_qkv": delta_net_projections("qkv")}
FEED_FORWARD_MODULES: LayerModules = {
    f"feed_forward.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")
}


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """One tensor contains all experts. By default, each expert is [inputs, outputs], and outputs of gate and up
    alternate, as in gpt-oss.
    """

    gate_up_halves: bool = False
    always_transposed: bool = False
    """If True and gate_up_halves, an expert is [inputs, outputs], not [outputs, inputs]."""
    maybe_transposed: bool = False


@dataclass(frozen=True, slots=True)
class WeightNames:
    model_modules: Mapping[str, str] = field(default_factory=dict)
    """Maps names without prefix to Llama's names."""
    layer_modules: LayerModules = field(default_factory=dict)
    """A fused module maps to several, in the order of their rows, which may be repeated for each head."""
    is_fused_by_kv_head: bool = False
    """Rows are ordered by key-value head, each with its queries, key and value (GPT-NeoX's order). In a delta net the
    order is by key head.
    """
    transposed_modules: tuple[str, ...] = ()
    """Modules whose weights are [in, out]."""
    has_interleaved_rope: bool = False
    unused_tensors: tuple[str, ...] = ()
    position_offset: int = 0
    """Unused first rows of the position table."""
    stacked_experts: StackedExperts | None = None
    """If None, each expert has its own tensors."""

    def gguf_weight_names(self) -> WeightNames:
        """GGUF tensors have Llama's names, except fused ones."""
        has_delta_net = any("linear_attn" in name for name in self.layer_modules)
        recurrent = {
            f"mamba.{name.rpartition('.')[2]}": own
            for name, own in self.layer_modules.items()
            if isinstance(own, tuple) and own[0].startswith("mamba.")
        }
        modules = {**FUSED_MODULES, **(GATED_DELTA_NET_MODULES if has_delta_net else {}), **recurrent}
        return WeightNames(layer_modules=modules, has_interleaved_rope=self.has_interleaved_rope)

    def model_module(self, name: str) -> str | None:
        return self.model_modules.get(MODEL_PREFIX_PATTERN.sub("", name))

    def modules_from_checkpoint(self, name: str) -> tuple[str, ...]:
        if (match := LAYER_MODULE_PATTERN.fullmatch(name)) is None:
            llama_name = self.model_module(name)
            return (name if llama_name is None else llama_name if llama_name == "lm_head" else f"model.{llama_name}",)
        layer_module = self.layer_modules.get(match[2], match[2])
        modules = (layer_module,) if isinstance(layer_module, str) else layer_module
        return tuple(f"model.layers.{match[1]}.{each}" for each in modules)

    def module_in_checkpoint(self, name: str) -> str:
        """Return the stored module, possibly fused, that contains `name`."""
        if (match := LAYER_MODULE_PATTERN.fullmatch(name)) is None:
            return name
        for stored, modules in self.layer_modules.items():
            if match[2] == modules or (isinstance(modules, tuple) and match[2] in modules):
                return f"model.layers.{match[1]}.{stored}"
        return name


def rope_head_permutation(rope: Mapping[str, Any], head_dim: int, *, interleaved: bool) -> list[int] | None:
    """Order in which RoPE pairs i with i + head_dim / 2; None for the stored order. In both halves, unrotated elements
    follow the rotated ones.
    """
    size = rotated_size(rope, head_dim)
    rotated, unrotated = list(range(size)), list(range(size, head_dim))
    first, second = (rotated[::2], rotated[1::2]) if interleaved else (rotated[: size // 2], rotated[size // 2 :])
    order = [*first, *unrotated[: len(unrotated) // 2], *second, *unrotated[len(unrotated) // 2 :]]
    return None if order == sorted(order) else order
