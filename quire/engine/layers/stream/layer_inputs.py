"""Embeddings of each layer (Gemma 3n, 2025; Gemma 4): a token has some numbers for every layer beside its embedding,
from a table of its own and from a projection of the embedding, which a gate lets into the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.norm import NormSpec, NormWeights
from quire.engine.layers.parameters import ParameterTable, held, parameters_of
from quire.engine.layers.part import BuildContext, Step, Sublayer, SublayerSpec
from quire.kernels.activation import Activation
from quire.kernels.backend import LinearContext, Operations, Table

TABLE, PROJECTION = "model.embed_tokens_per_layer", "model.per_layer_model_projection"
PROJECTION_NORM = "model.per_layer_projection_norm"
_GELU = Activation("gelu_tanh")


@dataclass(frozen=True, slots=True)
class LayerInputsSpec:
    """What tokens have for all layers."""

    vocab_size: int
    size: int
    """Numbers of a token for each layer."""
    layers: int
    norm: NormSpec
    image_token: int
    """Whose numbers the tokens have that stand for a part of an image."""


class LayerInputs:
    """Makes a token's numbers for all layers. Fill it by way of `parameters()` before use."""

    def __init__(self, spec: LayerInputsSpec, making: BuildContext) -> None:
        self._spec, self._backend, self._scheme = spec, making.backend, making.scheme
        self._width, hidden = spec.size * spec.layers, making.hidden_size
        self._stored = making.scheme.table(spec.vocab_size, self._width)
        self._table: dict[str, Table] = {}
        # The factors of the model's own embeddings are rounded to its type too.
        self._scale = torch.tensor(spec.size**0.5, dtype=making.dtype).item()
        self._shrink = hidden**-0.5
        linear = partial(JoinedLinear, making.scheme, bias=False, adapters=making.adapters)
        self._projection = linear(hidden, {PROJECTION: self._width})
        self._norm = NormWeights({PROJECTION_NORM: spec.size}, making.dtype, spec.norm)

    def parameters(self) -> ParameterTable:
        stored, make = self._stored, partial(self._scheme.pack_table, tied=False)
        table = {f"{TABLE}.weight": held(self._table, TABLE, stored.shape, stored.dtype, make)}
        return table | parameters_of(self._projection, self._norm)

    def of(self, token_ids: Tensor, x: Tensor, images: Tensor | None, context: LinearContext) -> Tensor:
        """[T, layers * size] for tokens [T] and their embeddings x [T, hidden]; `images`: the places of those that
        stand for a part of an image."""
        if images is not None:
            token_ids = token_ids.clone().index_fill_(0, images, self._spec.image_token)
        own = self._table[TABLE].look_up(token_ids) * self._scale
        projected = self._projection.packed(x, context) * self._shrink
        normed = self._norm.norm(self._backend, PROJECTION_NORM, projected.view(-1, self._spec.size))
        return (normed.view_as(own) + own) * 2.0**-0.5


@dataclass(frozen=True, slots=True)
class LayerInputSpec(SublayerSpec):
    """What lets a layer's own of these numbers into the stream."""

    size: int
    layer: int
    norm: NormSpec

    def part(self, making: BuildContext, layer: str) -> LayerInput:
        return LayerInput(self, making, layer)


class LayerInput(Sublayer):
    """Each rank has all of it: it is small."""

    def __init__(self, spec: LayerInputSpec, making: BuildContext, layer: str) -> None:
        self._first, hidden = spec.size * spec.layer, making.hidden_size
        linear = partial(JoinedLinear, making.scheme, bias=False, adapters=making.adapters)
        self._gate = linear(hidden, {f"{layer}.per_layer_input_gate": spec.size})
        self._projection = linear(spec.size, {f"{layer}.per_layer_projection": hidden})
        self._name = f"{layer}.post_per_layer_input_norm"
        self._norms = NormWeights({self._name: hidden}, making.dtype, spec.norm)

    def parameters(self) -> ParameterTable:
        return parameters_of(self._norms, self._gate, self._projection)

    def forward(self, run: Operations, x: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        assert residual is not None
        assert step.beside is not None
        residual = run.add(x, residual)
        gate = run.activate(run.apply(self._gate.packed, residual, step.context), _GELU)
        own = run.mul_columns(gate, step.beside, self._first)
        x = run.apply(self._projection.packed, own, step.context)
        return self._norms.norm(run, self._name, x), residual
