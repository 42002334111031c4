from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from quire.engine.architecture.recurrent import CONV_BIAS, CONV_WEIGHT, MatrixStateSpec, ShortConvSpec
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.parameters import ParameterTable, identity
from quire.engine.layers.shard import LinearSlice
from quire.engine.layers.sublayer import BuildContext, CacheTensorSpec, ForwardContext, Sublayer
from quire.engine.layers.sublayer_shapes import SublayerShapes
from quire.kernels.backend import Operations
from quire.kernels.recurrent.recurrence import Recurrence, RecurrentStates
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv


class RecurrentMixer(Sublayer):
    _out: FusedLinear

    def __init__(
        self,
        spec: MatrixStateSpec | ShortConvSpec,
        build_context: BuildContext,
        layer: str,
        name: str,
        parent_module: str | None = None,
    ) -> None:
        self._shapes = SublayerShapes(spec.parameter_shapes(layer, build_context.hidden_size), build_context)
        layer = layer if parent_module is None else f"{layer}.{parent_module}"
        self._build_context, self._prefix = build_context, f"{layer}.{name}"
        self._input_norm, self._output_norm = f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"
        self._norms = self._shapes.make_norms((self._input_norm, self._output_norm), spec.norm)
        self._weights: dict[str, Tensor] = {}
        """float32 weights that are not in linears or norms."""

    def _make_linear(self, slices: Mapping[str, LinearSlice], *, takes_bias: bool = True) -> FusedLinear:
        named_slices = {f"{self._prefix}.{name}": part for name, part in slices.items()}
        return self._shapes.make_linear(list(named_slices), named_slices, takes_bias=takes_bias)

    def _make_parameters(
        self, names: Iterable[str], slice_tensor: Callable[[Tensor], Tensor] = identity
    ) -> ParameterTable:
        return self._shapes.make_parameters(self._weights, self._prefix, names, slice_tensor)

    def _project_output(
        self, ops: Operations, mixed: Tensor, residual: Tensor, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """`mixed` has all tokens; the result has only the selected rows."""
        context = step.linear_context
        if step.selected_rows is not None:
            mixed = mixed[step.selected_rows]
            residual = residual[step.selected_rows]
            context = context.select_rows(step.selected_rows)
        x = ops.all_reduce(ops.apply_linear(self._out.packed_linear, mixed, context), self._build_context.shard.group)
        return self._norms.apply_norm(ops, self._output_norm, x), residual


class MatrixStateMixer(RecurrentMixer):
    def __init__(
        self,
        spec: MatrixStateSpec,
        build_context: BuildContext,
        layer: str,
        name: str,
        parent_module: str | None = None,
    ) -> None:
        super().__init__(spec, build_context, layer, name, parent_module)
        self._state_spec, self._head_span = spec, build_context.shard.rank_span(spec.num_heads)

    def _slice_channels(self, tensor: Tensor) -> Tensor:
        """`tensor` [channels, ...]."""
        kinds = self._state_spec.conv_input_shapes
        parts = zip(tensor.split([heads * size for heads, size in kinds]), self._channel_spans, strict=True)
        return torch.cat([part[span.start : span.stop] for part, span in parts])

    @property
    def _channel_spans(self) -> list[range]:
        head_spans = [
            (self._build_context.shard.rank_span(heads), size) for heads, size in self._state_spec.conv_input_shapes
        ]
        return [range(span.start * size, span.stop * size) for span, size in head_spans]

    def slot_tensor_specs(self, num_slots: int, num_drafts: int) -> tuple[CacheTensorSpec, ...]:
        """Convolution inputs, states, and inputs of draft tokens, which are replayed if the tokens are accepted."""
        shape = self._state_spec
        dtype = self._build_context.dtype
        heads = len(self._head_span)
        channels = sum(len(span) for span in self._channel_spans)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (
            CacheTensorSpec((num_slots, shape.conv_width - 1 + num_drafts, channels), dtype),
            CacheTensorSpec((num_slots, heads, shape.key_dim, shape.value_dim), wide),
            CacheTensorSpec((num_slots, num_drafts, channels + shape.extra_values_per_draft(heads)), dtype),
        )

    def _convolve(self, ops: Operations, x: Tensor, step: ForwardContext) -> Tensor:
        return ops.short_conv(x, self.conv_params, ConvStates(None, 1, step.cache[0]), step.metadata)

    def _run_recurrence(
        self, ops: Operations, x: Tensor, z: Tensor, head_inputs: Tensor, step: ForwardContext
    ) -> Tensor:
        return ops.run_recurrence(
            x, z, head_inputs, self.recurrence_params, RecurrentStates(*step.cache[1:]), step.metadata
        )

    @cached_property
    def conv_params(self) -> ShortConv:
        """Requires loaded weights."""
        weight = self._weights[CONV_WEIGHT][:, 0].t().contiguous()
        return ShortConv(weight, self._weights.get(CONV_BIAS), is_gated=False)

    @cached_property
    @abstractmethod
    def recurrence_params(self) -> Recurrence:
        """Requires loaded weights."""
