"""Mixture of experts (Shazeer et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from quire.engine.architecture.moe import LatentMoESpec, MoELayerSpec, SharedExpertSpec
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.parameters import ParameterTable, identity, merge_parameters
from quire.engine.layers.schemes import UnquantizedScheme
from quire.engine.layers.schemes.stacked import make_expert_schemes
from quire.engine.layers.shard import UNSHARDED, LinearSlice, ModelShard
from quire.engine.layers.sublayer import BuildContext, ForwardContext, Sublayer, activate_gate_up
from quire.engine.layers.sublayer_shapes import SublayerShapes
from quire.kernels.backend import Operations
from quire.kernels.parameters.activation import Activation
from quire.kernels.quantized_tensors import Activations, select_linear_input
from quire.kernels.routing import MoE, MoEComponents

_RELU_SQUARED = Activation("relu2")


class SparseMoE(Sublayer):
    """Adapters apply only to shared experts and latent projections. Each rank has the whole router."""

    def __init__(self, spec: MoELayerSpec, build_context: BuildContext, layer: str) -> None:
        backend, scheme = build_context.expert_packing or (build_context.backend, build_context.scheme)
        self._spec = spec
        self._backend = backend
        self._shard = build_context.shard
        self._hidden_size = build_context.hidden_size
        self._prefix = prefix = spec.prefix(layer)
        self._shapes = shapes = SublayerShapes(spec.parameter_shapes(layer, build_context.hidden_size), build_context)
        router_dtype = torch.float32 if spec.float_router else build_context.dtype
        self._router = _make_replicated_dense_linear(
            shapes, build_context, f"{prefix}.{spec.router}", router_dtype, wide=True
        )
        self._local_experts = (
            build_context.shard.rank_span(spec.num_experts) if spec.is_expert_parallel else range(spec.num_experts)
        )
        stacks = backend.stacks_experts(build_context.device, build_context.dtype)
        local_schemes = make_expert_schemes(scheme, len(self._local_experts), stacks=stacks)
        scheme_of = dict(zip(self._local_experts, local_schemes, strict=True))
        shard = UNSHARDED if spec.is_expert_parallel else build_context.shard
        linears = [
            _make_mlp_linears(
                shapes.with_context(scheme=scheme_of.get(index, scheme), adapters=None),
                shard,
                f"{prefix}.experts.{index}",
                (spec.gate, spec.up, spec.down),
            )
            for index in range(spec.num_experts)
        ]
        self._remote_linears = [linear for number, linear in enumerate(linears) if number not in self._local_experts]
        local_linears = [linears[number] for number in self._local_experts]
        self._gate_up, self._down = [up for up, _ in local_linears], [down for _, down in local_linears]
        self._weights: dict[str, Tensor] = {}
        self._input_norm, self._output_norm = f"{layer}.{spec.input_norm_name}", f"{layer}.{spec.output_norm_name}"
        self._norms = shapes.make_norms((self._input_norm, self._output_norm), spec.norm)
        self._latent = None if spec.latent is None else _LatentProjections(spec.latent, shapes, self._shard, layer)
        self._shared_expert = (
            None
            if spec.shared_expert is None
            else _SharedExpert(spec.shared_expert, shapes, build_context, layer, gated=spec.gated)
        )
        self._extra_input_linears = tuple(
            module.input_linear for module in (self._shared_expert, self._latent) if module is not None
        )

    def parameters(self) -> ParameterTable:
        spec = self._spec
        linears = (self._router, *self._gate_up, *self._down)
        table = merge_parameters(self._norms, self._shared_expert, self._latent, *linears)
        remote_parameters = merge_parameters(*chain.from_iterable(self._remote_linears))
        table |= {
            name: replace(each, weight_loader=_discard_tensor, slice_tensor=_empty_slice)
            for name, each in remote_parameters.items()
        }
        transforms: tuple[tuple[str | None, Callable[[Tensor], Tensor]], ...] = (
            (spec.correction, lambda tensor: tensor.flatten().contiguous()),
            (spec.expert_scales, identity),
            (spec.router_scale, lambda tensor: tensor * self._hidden_size**-0.5),
        )
        for name, transform in transforms:
            if name is not None:
                table |= self._shapes.make_parameters(self._weights, self._prefix, [name], transform=transform)
        return table

    def _get_weight(self, name: str | None) -> Tensor | None:
        return None if name is None else self._weights[name]

    def process_weights_after_loading(self) -> None:
        assert self._packed_moe is not None  # packs the experts

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        previous_output = x
        parallel, input_linears = self._spec.parallel, (self._router, *self._extra_input_linears)
        normed, residual = self._norms.norm_for_linears(
            input_linears, ops, self._input_norm, x, residual, parallel=parallel
        )
        x = select_linear_input(self._packed_moe, normed)
        scale = self._get_weight(self._spec.router_scale)
        routed = x if scale is None else ops.rms_norm(residual, scale, self._spec.norm.eps)
        shared_output = (
            None if self._shared_expert is None else self._shared_expert.compute_output_and_gate(ops, normed, step)
        )  # before x may be overwritten
        latent = self._latent
        x = ops.run_moe(self._packed_moe, x if latent is None else latent.project_in(ops, normed, step), routed)
        x = x if latent is None else latent.project_out(ops, x, step)
        x = (
            x
            if self._shared_expert is None or shared_output is None
            else self._shared_expert.add_output(ops, *shared_output, x)
        )
        x = self._norms.apply_norm(ops, self._output_norm, ops.all_reduce(x, self._shard.group))
        return ops.add_residual(x, previous_output) if self._spec.parallel else x, residual

    @cached_property
    def _packed_moe(self) -> MoE:
        spec = self._spec
        experts = MoEComponents(
            router=self._router.packed_linear,
            gate_up=[each.packed_linear for each in self._gate_up],
            down=[each.packed_linear for each in self._down],
            routing=spec.routing,
            clamped_swiglu=spec.clamp,
            activation=None if spec.gated else _RELU_SQUARED,
            score_correction_bias=self._get_weight(spec.correction),
            expert_scales=self._get_weight(spec.expert_scales),
            has_gelu_gates=spec.gelu,
            has_float32_router=spec.float_router,
            first_expert=self._local_experts.start,
        )
        return self._backend.make_moe(experts)


class _SharedExpert:
    def __init__(
        self, spec: SharedExpertSpec, shapes: SublayerShapes, build_context: BuildContext, layer: str, *, gated: bool
    ) -> None:
        self._is_gated = gated
        names = ("gate_proj", "up_proj", "down_proj")
        self._up, self._down = _make_mlp_linears(shapes, build_context.shard, f"{layer}.{spec.name}", names)
        self._gate = (
            None
            if spec.gate_name is None
            else _make_replicated_dense_linear(shapes, build_context, f"{layer}.{spec.gate_name}", build_context.dtype)
        )

    def parameters(self) -> ParameterTable:
        return merge_parameters(self._up, self._down, self._gate)

    @property
    def input_linear(self) -> FusedLinear:
        """The gate is not included, because it is never quantized."""
        return self._up

    def compute_output_and_gate(
        self, ops: Operations, x: Activations, step: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output [T, hidden], and the gate [T, 1] or None."""
        up = ops.apply_linear(self._up.packed_linear, x, step.linear_context)
        activated = activate_gate_up(ops, up, self._down) if self._is_gated else ops.apply_activation(up, _RELU_SQUARED)
        output = ops.apply_linear(self._down.packed_linear, activated, step.linear_context)
        return output, None if self._gate is None else ops.apply_linear(
            self._gate.packed_linear, x, step.linear_context
        )

    def add_output(self, ops: Operations, output: Tensor, gate: Tensor | None, routed: Tensor) -> Tensor:
        """May overwrite `routed`."""
        return ops.add_residual(output, routed) if gate is None else ops.add_gated(output, gate, routed)


class _LatentProjections:
    """Projections that every rank has. The output projection reads this rank's partial sum, so that one reduction
    includes the shared experts.
    """

    def __init__(self, spec: LatentMoESpec, shapes: SublayerShapes, shard: ModelShard, layer: str) -> None:
        input_name, output_name = (f"{layer}.{name}" for name in spec.projection_names)
        self.input_linear = shapes.make_linear([input_name])
        self._output_linear = shapes.make_linear([output_name], {output_name: LinearSlice(adds_bias=shard.rank == 0)})

    def parameters(self) -> ParameterTable:
        return self.input_linear.parameters() | self._output_linear.parameters()

    def project_in(self, ops: Operations, x: Activations, step: ForwardContext) -> Tensor:
        return self.input_linear.project(ops, x, step.linear_context)

    def project_out(self, ops: Operations, x: Tensor, step: ForwardContext) -> Tensor:
        return self._output_linear.project(ops, x, step.linear_context)


def _make_replicated_dense_linear(
    shapes: SublayerShapes, build_context: BuildContext, name: str, dtype: torch.dtype, *, wide: bool = False
) -> FusedLinear:
    """The linear is never quantized, because routing would change."""
    scheme = UnquantizedScheme(build_context.backend, dtype)
    return shapes.with_context(scheme=scheme, adapters=None).make_linear([name], wide=wide)


def _make_mlp_linears(
    shapes: SublayerShapes, shard: ModelShard, prefix: str, names: tuple[str, str, str]
) -> tuple[FusedLinear, FusedLinear]:
    gate, up, down = (f"{prefix}.{name}" for name in names)
    size, input_names = shapes.in_features(down), [name for name in (gate, up) if name in shapes]
    return (
        shapes.make_linear(input_names, dict.fromkeys(input_names, shard.output_slice(size))),
        shapes.make_linear([down], {down: shard.input_slice(size)}),
    )


def _empty_slice(tensor: Tensor) -> Tensor:
    return tensor.new_empty(0)


def _discard_tensor(tensor: Tensor) -> None:
    pass
