"""A mixture of experts in an MLP's place (Shazeer et al., 2017): a router chooses some MLPs for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from quire.engine.architecture.moe import LatentMoESpec, MoELayerSpec, SharedExpertSpec
from quire.engine.layers.adapters import AdapterManager
from quire.engine.layers.linear import FusedLinear
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import ParameterTable, identity, make_loadable_parameter, merge_parameters
from quire.engine.layers.schemes import UnquantizedScheme
from quire.engine.layers.shard import UNSHARDED, LinearSlice, ModelShard
from quire.engine.layers.sublayer import BuildContext, ForwardContext, Sublayer, activate_gate_up
from quire.kernels.backend import Operations
from quire.kernels.parameters.activation import Activation
from quire.kernels.quantized_tensors import Activations, select_linear_input
from quire.kernels.routing import MoE, MoEComponents

_RELU_SQUARED = Activation("relu2")


class SparseMoE(Sublayer):
    """The sparse feed-forward part of a layer. Of its linears those of shared experts, and those around experts of
    smaller vectors, have room for adapters. Each rank has a part of every expert, or some of them whole, and the whole
    router."""

    def __init__(self, spec: MoELayerSpec, build_context: BuildContext, layer: str) -> None:
        backend, scheme = build_context.expert_packing or (build_context.backend, build_context.scheme)
        self._spec = spec
        self._backend = backend
        self._shard = build_context.shard
        hidden, intermediate_size = build_context.hidden_size, spec.intermediate_size
        self._prefix, self._hidden_size = f"{layer}.{spec.name}" if spec.name else layer, hidden
        router, router_dtype = (
            f"{self._prefix}.{spec.router}",
            torch.float32 if spec.float_router else build_context.dtype,
        )
        self._router = _make_replicated_dense_linear(
            build_context, hidden, {router: spec.num_experts}, router_dtype, bias=spec.router_bias, wide=True
        )
        expert_names = [f"{self._prefix}.experts.{index}" for index in range(spec.num_experts)]
        names = (spec.gate, spec.up, spec.down) if spec.gated else (spec.up, spec.down)
        self._latent = None if spec.latent is None else _LatentProjections(spec.latent, build_context, layer)
        expert_context = replace(
            build_context, scheme=scheme, hidden_size=hidden if spec.latent is None else spec.latent.latent_size
        )
        shard = UNSHARDED if spec.is_expert_parallel else build_context.shard
        linears = [
            _make_mlp_linears(
                expert_context, intermediate_size, name, names, bias=spec.bias, adapters=None, shard=shard
            )
            for name in expert_names
        ]
        self._local_experts = (
            build_context.shard.rank_span(spec.num_experts) if spec.is_expert_parallel else range(spec.num_experts)
        )
        self._remote_linears = [linear for number, linear in enumerate(linears) if number not in self._local_experts]
        local_linears = [linears[number] for number in self._local_experts]
        self._gate_up, self._down = [up for up, _ in local_linears], [down for _, down in local_linears]
        self._weights: dict[str | None, Tensor] = {}
        input_norm_name, output_norm_name = spec.norm_names
        self._input_norm = f"{layer}.{'input_layernorm' if spec.shares_norm else input_norm_name}"
        self._output_norm = f"{layer}.{output_norm_name}"
        norms = [self._input_norm] * spec.input_norm + [self._output_norm] * spec.output_norm
        self._norms = NormWeights(dict.fromkeys(norms, hidden), build_context.dtype, spec.norm)
        self._shared_expert = (
            None
            if spec.shared_expert is None
            else _SharedExpert(spec.shared_expert, build_context, layer, gated=spec.gated)
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
        learned: tuple[tuple[str | None, tuple[int, ...], Callable[[Tensor], Tensor]], ...] = (
            (
                spec.correction,
                (1,) * spec.correction_row + (spec.num_experts,),
                lambda tensor: tensor.flatten().contiguous(),
            ),
            (spec.expert_scales, (spec.num_experts,), identity),
            (spec.router_scale, (self._hidden_size,), lambda tensor: tensor * self._hidden_size**-0.5),
        )
        for name, shape, make in learned:
            if name is not None:
                table[f"{self._prefix}.{name}"] = make_loadable_parameter(
                    self._weights, name, shape, torch.float32, make
                )
        return table

    def process_weights_after_loading(self) -> None:
        assert self._packed_moe is not None  # makes it

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        previous_output = x
        parallel, input_linears = self._spec.parallel, (self._router, *self._extra_input_linears)
        normed, residual = self._norms.norm_for_linears(
            input_linears, ops, self._input_norm, x, residual, parallel=parallel
        )
        x = select_linear_input(self._packed_moe, normed)
        scale = self._weights.get(self._spec.router_scale)
        routed = x if scale is None else ops.rms_norm(residual, scale, self._spec.norm.eps)
        shared_output = (
            None if self._shared_expert is None else self._shared_expert.compute_output_and_gate(ops, normed, step)
        )  # before x goes
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
            score_correction_bias=self._weights.get(spec.correction),
            expert_scales=self._weights.get(spec.expert_scales),
            has_gelu_gates=spec.gelu,
            has_float32_router=spec.float_router,
            first_expert=self._local_experts.start,
        )
        return self._backend.make_moe(experts)


class _SharedExpert:
    """What every token has beside its experts."""

    def __init__(self, spec: SharedExpertSpec, build_context: BuildContext, layer: str, *, gated: bool) -> None:
        names = ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj")
        prefix = f"{layer}.{spec.name}"
        size = spec.intermediate_size
        self._is_gated = gated
        self._up, self._down = _make_mlp_linears(
            build_context,
            size,
            prefix,
            names,
            bias=spec.bias,
            adapters=build_context.adapters,
            shard=build_context.shard,
        )
        gate = None if spec.gate_name is None else {f"{layer}.{spec.gate_name}": 1}
        self._gate = (
            None
            if gate is None
            else _make_replicated_dense_linear(build_context, build_context.hidden_size, gate, build_context.dtype)
        )

    def parameters(self) -> ParameterTable:
        return merge_parameters(self._up, self._down, self._gate)

    @property
    def input_linear(self) -> FusedLinear:
        """What reads x, beside the gate, which never has few bits."""
        return self._up

    def compute_output_and_gate(
        self, ops: Operations, x: Activations, step: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """What they give for x [T, hidden], and their gate's numbers [T, 1], if there is one."""
        up = ops.apply_linear(self._up.packed_linear, x, step.linear_context)
        activated = activate_gate_up(ops, up, self._down) if self._is_gated else ops.apply_activation(up, _RELU_SQUARED)
        output = ops.apply_linear(self._down.packed_linear, activated, step.linear_context)
        return output, None if self._gate is None else ops.apply_linear(
            self._gate.packed_linear, x, step.linear_context
        )

    def add_output(self, ops: Operations, output: Tensor, gate: Tensor | None, routed: Tensor) -> Tensor:
        """That and what the experts have given, which it may overwrite."""
        return ops.add_residual(output, routed) if gate is None else ops.add_gated(output, gate, routed)


class _LatentProjections:
    """What stands around experts of smaller vectors, whole on every rank: the second linear takes what this rank's
    experts give, so that its results are summed with those of the shared ones."""

    def __init__(self, spec: LatentMoESpec, build_context: BuildContext, layer: str) -> None:
        input_name, output_name = (f"{layer}.{name}" for name in spec.projection_names)
        hidden = build_context.hidden_size
        size = spec.latent_size
        scheme = build_context.scheme
        bias = spec.bias
        adapters = build_context.adapters
        output_slices = {output_name: LinearSlice(adds_bias=build_context.shard.rank == 0)}
        self.input_linear = FusedLinear(scheme, hidden, {input_name: size}, bias=bias, adapters=adapters)
        self._output_linear = FusedLinear(
            scheme, size, {output_name: hidden}, bias=bias, adapters=adapters, cuts=output_slices
        )

    def parameters(self) -> ParameterTable:
        return self.input_linear.parameters() | self._output_linear.parameters()

    def project_in(self, ops: Operations, x: Activations, step: ForwardContext) -> Tensor:
        """What the experts read. x [T, hidden] stays."""
        return self.input_linear.project(ops, x, step.linear_context)

    def project_out(self, ops: Operations, x: Tensor, step: ForwardContext) -> Tensor:
        return self._output_linear.project(ops, x, step.linear_context)


def _make_replicated_dense_linear(
    build_context: BuildContext,
    in_features: int,
    out_features: dict[str, int],
    dtype: torch.dtype,
    *,
    bias: bool = False,
    wide: bool = False,
) -> FusedLinear:
    """A linear that each rank has whole and that never has few bits: choices would change."""
    return FusedLinear(UnquantizedScheme(build_context.backend, dtype), in_features, out_features, bias=bias, wide=wide)


def _make_mlp_linears(
    build_context: BuildContext,
    size: int,
    prefix: str,
    names: tuple[str, ...],
    *,
    bias: bool,
    adapters: AdapterManager | None,
    shard: ModelShard,
) -> tuple[FusedLinear, FusedLinear]:
    """This rank's part of an MLP so wide: what reads, a gate and up as one or up alone, and its down."""
    *input_names, down = (f"{prefix}.{name}" for name in names)
    hidden = build_context.hidden_size
    outs, ins = dict.fromkeys(input_names, shard.output_slice(size)), {down: shard.input_slice(size)}
    input_sizes = dict.fromkeys(input_names, size)
    input_linear = FusedLinear(build_context.scheme, hidden, input_sizes, bias=bias, adapters=adapters, cuts=outs)
    return input_linear, FusedLinear(build_context.scheme, size, {down: hidden}, bias=bias, adapters=adapters, cuts=ins)


def _empty_slice(tensor: Tensor) -> Tensor:
    """Of another rank's expert: its bytes are not read."""
    return tensor.new_empty(0)


def _discard_tensor(tensor: Tensor) -> None:
    pass
