"""Attention and MLP with weights that several layers share (Zamba 2: Glorioso et al., 2024).

Both read the residual stream and the embeddings. Each use of the weights has its own low-rank adapters and output
linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce

from torch import Tensor

from quire.engine.architecture.shared_transformer import SHARED_TRANSFORMER, SharedTransformerSpec
from quire.engine.layers.adapters import AdapterManager
from quire.engine.layers.attention import Attention
from quire.engine.layers.linear import FusedLinear, Projection
from quire.engine.layers.parameters import ParameterTable, merge_parameters
from quire.engine.layers.schemes import QuantizationScheme
from quire.engine.layers.shard import LinearSlice
from quire.engine.layers.sublayer import BuildContext, CacheTensorSpec, ForwardContext, Sublayer
from quire.engine.layers.sublayer_shapes import SublayerShapes
from quire.kernels.backend import LinearContext, Operations
from quire.kernels.quantized_tensors import Activations


class SharedTransformer(Sublayer):
    def __init__(self, spec: SharedTransformerSpec, build_context: BuildContext, layer: str) -> None:
        shard = build_context.shard
        self._spec, self._build_context = spec, build_context
        self._weights_prefix, self._use_prefix = spec.weights_prefix, f"{layer}.{SHARED_TRANSFORMER}"
        shapes = SublayerShapes(spec.parameter_shapes(layer, build_context.hidden_size), build_context)
        self._adapter_shapes = shapes.with_context(adapters=None)
        self._attention = Attention(
            spec.attention, replace(build_context, make_linear=self._make_attention_linear), self._weights_prefix
        )
        outs, ins = shard.output_slice(spec.intermediate_size), shard.input_slice(spec.intermediate_size)
        mlp = f"{self._weights_prefix}.feed_forward"
        slices = {f"{mlp}.gate_proj": outs, f"{mlp}.up_proj": outs, f"{mlp}.down_proj": ins}
        self._gate, self._up, self._down = (
            self._share_linear((name,), partial(shapes.make_linear, [name], {name: part}))
            for name, part in slices.items()
        )
        self._mlp_adapter = self._adapter_shapes.make_linear([f"{spec.mlp_adapter_name}.0"])
        self._gate_adapter, self._up_adapter = (
            self._adapter_shapes.make_linear([name], {name: outs})
            for name in (f"{spec.mlp_adapter_name}.1.gate", f"{spec.mlp_adapter_name}.1.up")
        )
        self._linear_out = shapes.make_linear([f"{layer}.linear"])
        self._norm = f"{self._weights_prefix}.input_layernorm"
        self._norms = shapes.make_norms([self._norm], spec.norm)

    def parameters(self) -> ParameterTable:
        mlp = (self._gate, self._up, self._down, self._mlp_adapter, self._gate_adapter, self._up_adapter)
        return merge_parameters(self._norms, self._attention, *mlp, self._linear_out)

    def block_tensor_specs(self, num_blocks: int) -> tuple[CacheTensorSpec, ...]:
        return self._attention.block_tensor_specs(num_blocks)

    @property
    def block_bytes_formula(self) -> str:
        return self._attention.block_bytes_formula

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """The returned output is not added to the residual stream."""
        residual = x if residual is None else ops.add_residual(x, residual)
        assert step.per_layer_inputs is not None
        joined = self._norms.apply_norm(ops, self._norm, ops.concat_columns(residual, step.per_layer_inputs))
        x, _ = self._attention.forward(ops, joined, residual, step)
        x = ops.apply_linear(
            self._linear_out.packed_linear, self._compute_mlp(ops, x, step.linear_context), step.linear_context
        )
        return x, residual

    def _compute_mlp(self, ops: Operations, x: Tensor, context: LinearContext) -> Tensor:
        low = ops.apply_linear(self._mlp_adapter.packed_linear, x, context)
        gate, up = (
            ops.add_residual(ops.apply_linear(adapter.packed_linear, low, context), shared.project(ops, x, context))
            for adapter, shared in ((self._gate_adapter, self._gate), (self._up_adapter, self._up))
        )
        gate = ops.apply_activation(gate, self._spec.activation)
        return ops.all_reduce(
            self._down.project(ops, ops.mul_by_column_slice(gate, up, 0), context), self._build_context.shard.group
        )

    def _make_attention_linear(
        self,
        scheme: QuantizationScheme,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        adapters: AdapterManager | None,
        cuts: Mapping[str, LinearSlice],
    ) -> Projection:
        def share(names: list[str]) -> Projection:
            sizes, slices = {name: parts[name] for name in names}, {name: cuts[name] for name in names}
            make_linear = partial(FusedLinear, scheme, in_features, sizes, bias=bias, adapters=adapters, cuts=slices)
            return self._share_linear(tuple(names), make_linear)

        projections = {f"{self._weights_prefix}.self_attn.{name}_proj": name for name in "qkv"}
        if not self._spec.adapts_attention or not projections.keys() & parts.keys():
            return share(list(parts))
        low_rank = []
        for name in parts:
            adapter = self._spec.attention_adapter_name(projections[name])
            lora_down = self._adapter_shapes.make_linear([f"{adapter}.0"])
            lora_up = self._adapter_shapes.make_linear([f"{adapter}.1"], {f"{adapter}.1": cuts[name]})
            low_rank.append(_LoRAProjection(share([name]), lora_down, lora_up))
        return _ConcatenatedOutputProjections(low_rank)

    def _share_linear(self, names: tuple[str, ...], make_linear: Callable[[], FusedLinear]) -> Projection:
        shared_linears = self._build_context.shared_linears
        if self._weights_prefix == self._use_prefix:
            shared_linears[names[0]] = linear = make_linear()
            return linear
        return shared_linears[names[0]].share_weights(
            tuple(name.replace(self._weights_prefix, self._use_prefix) for name in names)
        )


@dataclass(frozen=True, slots=True)
class _LoRAProjection:
    linear: Projection
    lora_down: FusedLinear
    lora_up: FusedLinear

    def project(self, ops: Operations, x: Activations, context: LinearContext) -> Tensor:
        delta = ops.apply_linear(
            self.lora_up.packed_linear, ops.apply_linear(self.lora_down.packed_linear, x, context), context
        )
        return ops.add_residual(delta, self.linear.project(ops, x, context))


@dataclass(frozen=True, slots=True)
class _ConcatenatedOutputProjections:
    projections: list[_LoRAProjection]

    def parameters(self) -> ParameterTable:
        return {
            name: parameter
            for each in self.projections
            for linear in (each.linear, each.lora_down, each.lora_up)
            for name, parameter in linear.parameters().items()
        }

    def project(self, ops: Operations, x: Activations, context: LinearContext) -> Tensor:
        return reduce(ops.concat_columns, (each.project(ops, x, context) for each in self.projections))
