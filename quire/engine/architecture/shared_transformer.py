"""Attention and MLP whose weights several layers share (Zamba 2: Glorioso et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.kv_cache_spec import AttentionSpec
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.parameter_shapes import (
    LinearSizes,
    ParameterShapes,
    linear_shapes,
    linear_sizes,
    mlp_shapes,
    norm_shapes,
)
from quire.engine.architecture.sublayer import StepCosts, SublayerSpec, divisibility_error
from quire.kernels.parameters.activation import Activation

SHARED_TRANSFORMER = "shared_transformer"


@dataclass(frozen=True, slots=True)
class SharedTransformerSpec(SublayerSpec):
    attention: AttentionLayerSpec
    """Its input has twice the hidden size."""
    intermediate_size: int
    bias: bool
    activation: Activation
    norm: NormSpec
    weights_layer: int
    """Layer under whose name a checkpoint stores the shared weights."""
    use_index: int
    adapter_rank: int
    adapts_attention: bool
    """Not only the MLP but also Q, K and V have low-rank linears."""

    @property
    def kv_cache_spec(self) -> AttentionSpec:
        spec = self.attention.kv_cache_spec
        assert isinstance(spec, AttentionSpec)
        return spec

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def attention_width(self) -> int:
        return self.attention.attention_width

    @property
    def kv_formula(self) -> str:
        return self.attention.kv_formula

    def step_costs(self, layer: str, hidden_size: int) -> StepCosts:
        return super(SharedTransformerSpec, self).step_costs(f"model.layers.{self.weights_layer}", hidden_size)

    def parameter_shapes(self, layer: str, hidden_size: int) -> ParameterShapes:
        weights = self.weights_prefix
        attention = self.attention
        shapes = linear_shapes([f"{layer}.linear"], hidden_size, hidden_size)
        if layer == f"model.layers.{self.weights_layer}":
            shapes |= attention.parameter_shapes(weights, hidden_size)
            shapes |= mlp_shapes(f"{weights}.feed_forward", self.intermediate_size, hidden_size, bias=self.bias)
        shapes |= norm_shapes({f"{weights}.input_layernorm": 2 * hidden_size}, self.norm)
        if self.adapts_attention:
            for name in "qkv":
                adapter = self.attention_adapter_name(name)
                heads = attention.num_heads if name == "q" else attention.num_kv_heads
                shapes |= linear_shapes([f"{adapter}.0"], self.adapter_rank, 2 * hidden_size)
                shapes |= linear_shapes([f"{adapter}.1"], heads * attention.head_dim, self.adapter_rank)
        adapter = self.mlp_adapter_name
        shapes |= linear_shapes([f"{adapter}.0"], self.adapter_rank, hidden_size)
        return shapes | linear_shapes(
            [f"{adapter}.1.gate", f"{adapter}.1.up"], self.intermediate_size, self.adapter_rank
        )

    @property
    def weights_prefix(self) -> str:
        return f"model.layers.{self.weights_layer}.{SHARED_TRANSFORMER}"

    def attention_adapter_name(self, projection: str) -> str:
        return f"{self.weights_prefix}.self_attn.linear_{projection}_adapter_list.{self.use_index}"

    @property
    def mlp_adapter_name(self) -> str:
        return f"{self.weights_prefix}.feed_forward.gate_up_proj_adapter_list.{self.use_index}"

    def adaptable_linears(self, layer: str, hidden_size: int) -> LinearSizes:
        prefix = f"{layer}.{SHARED_TRANSFORMER}"
        shapes = self.attention.parameter_shapes(prefix, hidden_size)
        shapes |= mlp_shapes(f"{prefix}.feed_forward", self.intermediate_size, hidden_size)
        return linear_sizes(shapes | linear_shapes([f"{layer}.linear"], hidden_size, hidden_size))

    def tensor_parallel_error(self, ranks: int) -> str | None:
        return divisibility_error(
            self.intermediate_size, f"intermediate_size {self.intermediate_size}", ranks
        ) or self.attention.tensor_parallel_error(ranks)
