"""Per-layer embeddings (Gemma 3n, 2025; Gemma 4)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.engine.architecture.stream import (
    EMBED_TOKENS_PER_LAYER,
    PER_LAYER_MODEL_PROJECTION,
    PER_LAYER_PROJECTION_NORM,
    PerLayerInputGateSpec,
    PerLayerInputsSpec,
)
from quire.engine.layers.parameters import ParameterTable, make_loadable_parameter, merge_parameters
from quire.engine.layers.sublayer import BuildContext, ForwardContext, Sublayer
from quire.engine.layers.sublayer_shapes import SublayerShapes
from quire.kernels.backend import LinearContext, Operations, QuantizedEmbedding
from quire.kernels.parameters.activation import Activation

_GELU = Activation("gelu_tanh")


class PerLayerInputs:
    def __init__(self, spec: PerLayerInputsSpec, build_context: BuildContext) -> None:
        self._spec = spec
        self._backend = build_context.backend
        self._scheme = build_context.scheme
        hidden = build_context.hidden_size
        shapes = SublayerShapes(spec.parameter_shapes(hidden), build_context)
        self._table_spec = build_context.scheme.embedding_tensor_spec(*shapes.rows_and_columns(EMBED_TOKENS_PER_LAYER))
        self._table: dict[str, QuantizedEmbedding] = {}
        # Rounded to the dtype, like the scale of Embedding.
        self._scale = torch.tensor(spec.size_per_layer**0.5, dtype=build_context.dtype).item()
        self._projection_scale = hidden**-0.5
        self._projection = shapes.make_linear([PER_LAYER_MODEL_PROJECTION])
        self._norm = shapes.make_norms([PER_LAYER_PROJECTION_NORM], spec.norm)

    def parameters(self) -> ParameterTable:
        spec, make = self._table_spec, partial(self._scheme.pack_embedding, tied=False)
        table = {
            f"{EMBED_TOKENS_PER_LAYER}.weight": make_loadable_parameter(
                self._table, EMBED_TOKENS_PER_LAYER, spec.shape, spec.dtype, make
            )
        }
        return table | merge_parameters(self._projection, self._norm)

    def compute_inputs(self, token_ids: Tensor, x: Tensor, image_rows: Tensor | None, context: LinearContext) -> Tensor:
        """Returns [T, layers * size] for x [T, hidden]. `image_rows`: indices of image tokens."""
        if image_rows is not None:
            token_ids = token_ids.clone().index_fill_(0, image_rows, self._spec.image_token_id)
        embedded = self._table[EMBED_TOKENS_PER_LAYER].embed_tokens(token_ids) * self._scale
        projected = self._projection.packed_linear(x, context) * self._projection_scale
        normed = self._norm.apply_norm(
            self._backend, PER_LAYER_PROJECTION_NORM, projected.view(-1, self._spec.size_per_layer)
        )
        return (normed.view_as(embedded) + embedded) * 2.0**-0.5


class PerLayerInputGate(Sublayer):
    def __init__(self, spec: PerLayerInputGateSpec, build_context: BuildContext, layer: str) -> None:
        self._first_column = spec.size_per_layer * spec.layer_index
        shapes = SublayerShapes(spec.parameter_shapes(layer, build_context.hidden_size), build_context)
        self._gate = shapes.make_linear([f"{layer}.per_layer_input_gate"])
        self._projection = shapes.make_linear([f"{layer}.per_layer_projection"])
        self._norm_name = f"{layer}.post_per_layer_input_norm"
        self._norms = shapes.make_norms([self._norm_name], spec.norm)

    def parameters(self) -> ParameterTable:
        return merge_parameters(self._norms, self._gate, self._projection)

    def forward(
        self, ops: Operations, x: Tensor, residual: Tensor | None, step: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        assert residual is not None
        assert step.per_layer_inputs is not None
        residual = ops.add_residual(x, residual)
        gate = ops.apply_activation(ops.apply_linear(self._gate.packed_linear, residual, step.linear_context), _GELU)
        gated = ops.mul_by_column_slice(gate, step.per_layer_inputs, self._first_column)
        x = ops.apply_linear(self._projection.packed_linear, gated, step.linear_context)
        return self._norms.apply_norm(ops, self._norm_name, x), residual
