"""Grouped-query attention (Ainslie et al., 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from quire.engine.architecture.kv_cache_spec import AttentionSpec, SharedKVSpec, attention_kv_cache_spec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import ParameterShapes, linear_shapes, norm_shapes
from quire.engine.architecture.rope import QueryScaling
from quire.engine.architecture.sublayer import SublayerSpec, divisibility_error


@dataclass(frozen=True, slots=True)
class AttentionLayerSpec(SublayerSpec):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: dict[str, Any] | None
    """Like ModelConfig.rope; None for NoPE."""
    norm: NormSpec
    window: int | None = None
    """Keys that a query sees, including its own; None for all."""
    chunked: bool = False
    softcap: float | None = None
    """A score s becomes c * tanh(s / c)."""
    sinks: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["heads", "whole", "centred", "after", "unit"] | None = None
    """See QKNormRopeParams.norm_kind. "unit" is "after" without weights."""
    query_scaling: QueryScaling | None = None
    """If None, llama_4_scaling_beta in `rope` may define the scaling."""
    alibi: float | None = None
    """Factor of all ALiBi slopes (Press et al., 2022), which `scale` does not change. See layers/rope.py."""
    input_norm: bool = True
    has_output_gate: bool = False
    """Outputs are multiplied by the sigmoid of a gate."""
    head_gates: bool = False
    output_norm: bool = False
    mrope_axes: tuple[int, ...] | None = None
    output_scale: float = 1.0
    input_size: int | None = None
    """If None, it is the hidden size."""
    v_norm: bool = False
    keys_are_values: bool = False
    lookahead: int | None = 0
    """Later keys that a query sees; None for all."""
    uses_bidirectional_spans: bool = True
    """In steps with bidirectional_spans, image tokens see each other."""
    kv_source_layer: int | None = None
    """Layer whose keys and values are read; None for its own."""

    @property
    def kv_cache_spec(self) -> AttentionSpec | SharedKVSpec:
        if self.kv_source_layer is not None:
            return SharedKVSpec(self.kv_source_layer, self.window)
        return attention_kv_cache_spec(2 * self.num_kv_heads * self.head_dim, self.head_dim, self.window)

    @property
    def attention_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_formula(self) -> str:
        """Formula of the values cached per token, for users; "" if none."""
        return "" if self.kv_source_layer is not None else f"2 x {self.num_kv_heads} heads x {self.head_dim}"

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        prefix = f"{layer}.self_attn"
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        in_features = self.input_size or hidden_size
        shapes = linear_shapes([f"{prefix}.q_proj"], q_size, in_features, bias=self.qkv_bias)
        if self.kv_source_layer is None:
            names = ["k_proj"] if self.keys_are_values else ["k_proj", "v_proj"]
            shapes |= linear_shapes([f"{prefix}.{name}" for name in names], kv_size, in_features, bias=self.qkv_bias)
        if self.has_output_gate:
            shapes |= linear_shapes([f"{prefix}.gate_proj"], q_size, hidden_size, bias=self.qkv_bias)
        elif self.head_gates:
            shapes |= linear_shapes([f"{prefix}.gate_proj"], self.num_heads, hidden_size)
        shapes |= linear_shapes([f"{prefix}.o_proj"], hidden_size, q_size, bias=self.out_bias)
        norms = {f"{layer}.input_layernorm": hidden_size} if self.input_norm else {}
        if self.output_norm:
            norms[f"{layer}.post_attention_layernorm"] = hidden_size
        shapes |= norm_shapes(norms, self.norm) | self._qk_norm_shapes(prefix)
        if self.sinks:
            shapes[f"{prefix}.sinks"] = (self.num_heads,)
        return shapes

    def _qk_norm_shapes(self, prefix: str) -> ParameterShapes:
        if self.qk_norm in (None, "unit"):
            return {}
        norms_all_heads = self.qk_norm in ("whole", "centred")
        sizes = {f"{prefix}.q_norm": self.num_heads * self.head_dim if norms_all_heads else self.head_dim}
        if self.kv_source_layer is None:
            sizes[f"{prefix}.k_norm"] = self.num_kv_heads * self.head_dim if norms_all_heads else self.head_dim
        return norm_shapes(sizes, NormSpec(self.norm.eps))

    def tensor_parallel_error(self, ranks: int) -> str | None:
        if (heads := divisibility_error(self.num_heads, f"{self.num_heads} heads", ranks)) is not None:
            return heads
        if self.num_kv_heads % ranks and ranks % self.num_kv_heads:
            return f"{ranks} ranks can neither divide the model's {self.num_kv_heads} key-value heads nor share them"
        if self.qk_norm in ("whole", "centred"):
            return "the norm of all heads' queries and keys cannot be divided among ranks"
        return None

    @property
    def gpu_error(self) -> str | None:
        return None if self.alibi is None else "ALiBi of attention is served only on CPUs so far"
