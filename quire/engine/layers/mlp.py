"""MLP, gated (Shazeer, 2020) or not."""

from __future__ import annotations

from functools import cached_property

import torch.nn.functional as F
from torch import Tensor

from quire.engine.architecture.mlp import MLPSpec
from quire.engine.layers.parameters import ParameterTable, merge_parameters
from quire.engine.layers.sublayer import (
    BuildContext,
    ForwardContext,
    SmoothableNorm,
    Sublayer,
    activate_gate_up,
    scale_tensor,
)
from quire.engine.layers.sublayer_shapes import SublayerShapes
from quire.kernels.backend import Operations
from quire.kernels.parameters.activation import Activation
from quire.kernels.quantized_tensors import Activations


class MLP(Sublayer):
    def __init__(self, spec: MLPSpec, build_context: BuildContext, layer: str) -> None:
        self._spec = spec
        self._shard = build_context.shard
        self._dtype = build_context.dtype
        self._prefix = prefix = f"{layer}.{spec.name}"
        self._shapes = shapes = SublayerShapes(spec.parameter_shapes(layer, build_context.hidden_size), build_context)
        shard, size = build_context.shard, spec.intermediate_size
        input_names = [name for name in (f"{prefix}.gate_proj", f"{prefix}.up_proj") if name in shapes]
        down = f"{prefix}.down_proj"
        self._up = shapes.make_linear(input_names, dict.fromkeys(input_names, shard.output_slice(size)))
        self._down = shapes.make_linear([down], {down: shard.input_slice(size)})
        self._output_norm = f"{layer}.{spec.output_norm_name}"
        self._input_norm = f"{layer}.{spec.input_norm_name}"
        self._norms = shapes.make_norms((self._input_norm, self._output_norm), spec.norm)
        self._activation_weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        table = merge_parameters(self._norms, self._up, self._down)
        prefix, weights = f"{self._prefix}.act_fn", self._activation_weights
        alphas = ("alpha_p", "alpha_n")  # stored before softplus
        table |= self._shapes.make_parameters(weights, prefix, alphas, transform=F.softplus)
        return table | self._shapes.make_parameters(weights, prefix, ["beta"])

    def smoothable_norms(self) -> tuple[SmoothableNorm, ...]:
        input_norm = SmoothableNorm(self._input_norm, self._spec.norm.weight_offset, (self._up,))
        return (input_norm,) if self._spec.input_norm else ()

    @cached_property
    def _activation(self) -> Activation:
        kind, learned = self._spec.activation, {name: each.item() for name, each in self._activation_weights.items()}
        assert kind != "silu"
        if kind != "xielu":
            return Activation(kind)
        slope = learned["beta"]
        return Activation(kind, learned["alpha_p"], learned["alpha_n"] + slope, slope)

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        attended = x
        parallel = self._spec.parallel
        normed, residual = self._norms.norm_for_linears(
            (self._up,), ops, self._input_norm, x, residual, parallel=parallel
        )
        activated = self._activate(ops, ops.apply_linear(self._up.packed_linear, normed, step.linear_context))
        x = ops.all_reduce(
            ops.apply_linear(self._down.packed_linear, activated, step.linear_context), self._shard.group
        )
        gate_multiplier, output_multiplier = self._spec.multipliers
        x = self._norms.apply_norm(ops, self._output_norm, scale_tensor(ops, x, output_multiplier / gate_multiplier))
        return ops.add_residual(x, attended) if self._spec.parallel else x, residual

    def _activate(self, ops: Operations, x: Tensor) -> Activations:
        if not self._spec.gated:
            return ops.apply_activation(x, self._activation)
        # Also scales the up projection, which is undone after down_proj.
        x = scale_tensor(ops, x, self._spec.multipliers[0])
        return activate_gate_up(ops, x, self._down, gelu=self._spec.activation == "gelu_tanh")
