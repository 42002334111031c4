"""Gated short convolution (LFM2: Liquid AI, 2025)."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from quire.engine.architecture.kv_cache_spec import HASH_BLOCK_SIZE
from quire.engine.architecture.recurrent import ShortConvSpec
from quire.engine.layers.parameters import ParameterTable, make_row_slicer, merge_parameters
from quire.engine.layers.recurrent.mixer import RecurrentMixer
from quire.engine.layers.sublayer import BuildContext, CacheTensorSpec, ForwardContext, SmoothableNorm
from quire.kernels.backend import Operations
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv


class ShortConvolution(RecurrentMixer):
    def __init__(self, spec: ShortConvSpec, build_context: BuildContext, layer: str) -> None:
        super().__init__(spec, build_context, layer, "conv")
        self._spec = spec
        channels = spec.num_channels
        shard = build_context.shard
        self._channels = shard.rank_span(channels)
        self._in = self._make_linear({f"{name}_proj": shard.output_slice(channels) for name in "bcx"})
        self._out = self._make_linear({"out_proj": shard.input_slice(channels)})

    def parameters(self) -> ParameterTable:
        conv_parameters = self._make_parameters(("conv.weight", "conv.bias"), make_row_slicer(self._channels))
        return merge_parameters(self._norms, self._in, self._out) | conv_parameters

    def smoothable_norms(self) -> tuple[SmoothableNorm, ...]:
        return (SmoothableNorm(self._input_norm, self._spec.norm.weight_offset, (self._in,)),)

    def block_tensor_specs(self, num_blocks: int) -> tuple[CacheTensorSpec, ...]:
        """The last convolution columns of every HASH_BLOCK_SIZE tokens, because a request may resume there."""
        hash_blocks = self._build_context.backend.block_size // HASH_BLOCK_SIZE
        shape = (num_blocks, hash_blocks, self._spec.conv_width - 1, len(self._channels))
        return (CacheTensorSpec(shape, self._build_context.dtype),)

    def slot_tensor_specs(self, num_slots: int, num_drafts: int) -> tuple[CacheTensorSpec, ...]:
        return (
            CacheTensorSpec(
                (num_slots, self._spec.conv_width - 1 + num_drafts, len(self._channels)), self._build_context.dtype
            ),
        )

    @property
    def block_bytes_formula(self) -> str:
        hash_blocks = self._build_context.backend.block_size // HASH_BLOCK_SIZE
        columns = (self._spec.conv_width - 1) * hash_blocks
        return f"{columns} columns x {len(self._channels)} channels x {self._build_context.dtype.itemsize} B"

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        normed, residual = self._norms.norm_for_linears((self._in,), ops, self._input_norm, x, residual)
        bcx, (ends, recent) = ops.apply_linear(self._in.packed_linear, normed, step.linear_context), step.cache
        convolved = ops.short_conv(bcx, self._conv_params, ConvStates(ends, HASH_BLOCK_SIZE, recent), step.metadata)
        return self._project_output(ops, convolved, residual, step)

    @cached_property
    def _conv_params(self) -> ShortConv:
        return ShortConv(self._weights["conv.weight"][:, 0].t().contiguous(), self._weights.get("conv.bias"))
