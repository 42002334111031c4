"""Attention and an MLP whose weights several layers share (Zamba 2: Glorioso et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.architecture.attention import AttentionLayerSpec
from quire.engine.architecture.kv_cache_spec import PagedState
from quire.engine.architecture.norm import NormSpec
from quire.engine.architecture.sublayer import SublayerSpec, divisibility_error
from quire.kernels.parameters.activation import Activation


@dataclass(frozen=True, slots=True)
class SharedTransformerSpec(SublayerSpec):
    attention: AttentionLayerSpec
    """Its input is twice as wide as the stream."""
    intermediate_size: int
    """Of the MLP,"""
    bias: bool
    """whose linears may have one,"""
    activation: Activation
    """and the function of its gates."""
    norm: NormSpec
    weights_layer: int
    """The layer that has the weights in a checkpoint."""
    use_index: int
    """Which of the uses of all blocks this is: its low-rank linears are called by it."""
    adapter_rank: int
    """Of these."""
    adapts_attention: bool
    """Queries, keys and values have some too, not only the MLP."""

    @property
    def kv_cache_spec(self) -> PagedState:
        state = self.attention.kv_cache_spec
        assert isinstance(state, PagedState)
        return state

    def tensor_parallel_error(self, ranks: int) -> str | None:
        return divisibility_error(
            self.intermediate_size, f"intermediate_size {self.intermediate_size}", ranks
        ) or self.attention.tensor_parallel_error(ranks)
