"""Attention and an MLP whose weights several layers share (Zamba 2: Glorioso et al., 2024): they read the stream and
the tokens' embeddings side by side, each use adds low-rank linears of its own, and what they give goes through another
linear to what the layer's state space reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce

from torch import Tensor

from quire.engine.architecture.shared_transformer import SHARED_TRANSFORMER, SharedTransformerSpec
from quire.engine.layers.adapters import AdapterManager
from quire.engine.layers.attention import Attention
from quire.engine.layers.linear import FusedLinear, Projection
from quire.engine.layers.norm import NormWeights
from quire.engine.layers.parameters import ParameterTable, merge_parameters
from quire.engine.layers.schemes import QuantizationScheme
from quire.engine.layers.shard import LinearSlice
from quire.engine.layers.sublayer import BuildContext, CacheTensorSpec, ForwardContext, Sublayer
from quire.kernels.backend import LinearContext, Operations
from quire.kernels.quantized_tensors import Activations


class SharedTransformer(Sublayer):
    def __init__(self, spec: SharedTransformerSpec, build_context: BuildContext, layer: str) -> None:
        shard = build_context.shard
        hidden = build_context.hidden_size
        intermediate_size = spec.intermediate_size
        self._spec, self._build_context = spec, build_context
        self._weights_prefix, self._use_prefix = (
            f"model.layers.{spec.weights_layer}.{SHARED_TRANSFORMER}",
            f"{layer}.{SHARED_TRANSFORMER}",
        )
        make_adapter = partial(FusedLinear, build_context.scheme, bias=False)
        self._attention_adapters = {
            name: (
                make_adapter(
                    2 * hidden,
                    {
                        f"{self._weights_prefix}.self_attn."
                        f"linear_{name}_adapter_list.{spec.use_index}.0": spec.adapter_rank
                    },
                ),
                f"{self._weights_prefix}.self_attn.linear_{name}_adapter_list.{spec.use_index}.1",
            )
            for name in ("qkv" if spec.adapts_attention else "")
        }
        self._attention = Attention(
            spec.attention, replace(build_context, make_linear=self._make_attention_linear), self._weights_prefix
        )
        mlp, make_shared = (
            f"{self._weights_prefix}.feed_forward",
            partial(self._make_shared_linear, build_context.scheme, adapters=build_context.adapters),
        )
        gate, up, down = (f"{mlp}.{name}_proj" for name in ("gate", "up", "down"))
        outs = shard.output_slice(intermediate_size)
        self._gate, self._up = (
            make_shared(hidden, {name: intermediate_size}, bias=spec.bias, cuts={name: outs}) for name in (gate, up)
        )
        self._down = make_shared(
            intermediate_size, {down: hidden}, bias=spec.bias, cuts={down: shard.input_slice(intermediate_size)}
        )
        adapter_prefix = f"{mlp}.gate_up_proj_adapter_list.{spec.use_index}"
        self._mlp_adapter = make_adapter(hidden, {f"{adapter_prefix}.0": spec.adapter_rank})
        self._gate_adapter, self._up_adapter = (
            make_adapter(spec.adapter_rank, {name: intermediate_size}, cuts={name: outs})
            for name in (f"{adapter_prefix}.1.gate", f"{adapter_prefix}.1.up")
        )
        self._linear_out = make_adapter(hidden, {f"{layer}.linear": hidden}, adapters=build_context.adapters)
        self._norm = f"{self._weights_prefix}.input_layernorm"
        self._norms = NormWeights({self._norm: 2 * hidden}, build_context.dtype, spec.norm)

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
        """What it gives is not to be added to the stream: see Mamba2LayerSpec.joins_input_only."""
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
        """One of attention's, as BuildContext.make_linear has it."""
        adapters_of = {
            f"{self._weights_prefix}.self_attn.{name}_proj": pair for name, pair in self._attention_adapters.items()
        }
        make_shared = partial(self._make_shared_linear, scheme, in_features, bias=bias, adapters=adapters)
        if not adapters_of.keys() & parts.keys():
            return make_shared(parts, cuts=cuts)
        projections = []
        for name, outs in parts.items():
            lora_down, lora_up_name = adapters_of[name]
            lora_up = FusedLinear(
                scheme, self._spec.adapter_rank, {lora_up_name: outs}, bias=False, cuts={lora_up_name: cuts[name]}
            )
            projections.append(_LoRAProjection(make_shared({name: outs}, cuts={name: cuts[name]}), lora_down, lora_up))
        return _ConcatenatedOutputProjections(projections)

    def _make_shared_linear(
        self,
        scheme: QuantizationScheme,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        adapters: AdapterManager | None,
        cuts: Mapping[str, LinearSlice],
    ) -> Projection:
        """Of the weights that all uses have."""
        first_name, shared_linears = next(iter(parts)), self._build_context.shared_linears
        if self._weights_prefix != self._use_prefix:
            return shared_linears[first_name].share_weights(
                tuple(name.replace(self._weights_prefix, self._use_prefix) for name in parts)
            )
        shared_linears[first_name] = FusedLinear(scheme, in_features, parts, bias=bias, adapters=adapters, cuts=cuts)
        return shared_linears[first_name]


@dataclass(frozen=True, slots=True)
class _LoRAProjection:
    """A linear, to which two small ones in a row are added."""

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
    """Some of one input, what they give side by side."""

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
