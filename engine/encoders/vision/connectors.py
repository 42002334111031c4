"""What makes tokens of a square's patches: pixel shuffle (Laurençon et al., 2024), two linears (Liu et al., 2023),
average pooling (Gemma Team, 2025)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.encoders.encoder import activation_of, held
from quire.engine.encoders.vision.tower import TowerMaking
from quire.engine.errors import ModelError
from quire.engine.layers.norm import LayerNormWeights
from quire.engine.layers.parameters import ParameterTable
from quire.kernels.activation import Activation
from quire.kernels.backend import NO_ADAPTERS, Linear


class Connector(ABC):
    """Fill it by way of `parameters()` before use."""

    @abstractmethod
    def parameters(self) -> ParameterTable:
        """As Tower.parameters."""

    @abstractmethod
    def __call__(self, hidden: Tensor) -> Tensor:
        """Patches [patches, hidden] by rows, behind a class token if there is one, to [tokens, text_size]."""


class Shuffled(Connector):
    """scale x scale patches side by side go through one linear."""

    def __init__(self, making: TowerMaking, hidden: int, side: int, scale: int, name: str) -> None:
        self._side, self._scale = side, scale
        self._linear = making.linear(hidden * scale**2, name, making.text_size, bias=False)

    def parameters(self) -> ParameterTable:
        return self._linear.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._linear.packed(shuffled(hidden, self._side, self._scale), NO_ADAPTERS)


def shuffled(hidden: Tensor, side: int, scale: int) -> Tensor:
    """[side * side, hidden] to [tokens, scale * scale * hidden], row by row of each scale x scale patches."""
    squares = hidden.view(side // scale, scale, side // scale, scale, -1).transpose(1, 2)
    return squares.reshape((side // scale) ** 2, -1).contiguous()


class TwoLinears(Connector):
    """Of each patch, with an activation between them."""

    def __init__(self, making: TowerMaking, hidden: int, act: str, name: str, *, bias: bool, skipped: int = 0) -> None:
        """skipped: rows before the patches that are no tokens. Raises ModelError for an activation that is not
        computed."""
        kind, size = activation_of(act), making.text_size
        if kind not in ("gelu", "gelu_tanh", "relu"):
            raise ModelError(f"model: config.json: projector_hidden_act: {act!r} is not served")
        self._activation, self._backend, self._skipped = Activation(kind), making.backend, skipped
        self._first = making.linear(hidden, f"{name}.linear_1", size, bias=bias)
        self._last = making.linear(size, f"{name}.linear_2", size, bias=bias)

    def parameters(self) -> ParameterTable:
        return self._first.parameters() | self._last.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:
        wide = self._first.packed(hidden[self._skipped :].contiguous(), NO_ADAPTERS)
        return self._last.packed(self._backend.activate(wide, self._activation), NO_ADAPTERS)


class ShuffledLinears(Connector):
    """scale x scale patches side by side go through a norm and two linears; a class token is left out."""

    def __init__(self, making: TowerMaking, hidden: int, side: int, scale: int, act: str, name: str) -> None:
        self._side, self._scale, self._backend = side, scale, making.backend
        self._norm = LayerNormWeights(f"{name}.layer_norm", hidden * scale**2, bias=True)
        self._linears = TwoLinears(making, hidden * scale**2, act, name, bias=True)

    def parameters(self) -> ParameterTable:
        return self._norm.parameters() | self._linears.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:
        x, norm = shuffled(hidden[1:], self._side, self._scale), self._norm
        return self._linears(self._backend.layer_norm(x, norm.weight, norm.bias, 1e-5))


class Pooled(Connector):
    """The mean of the patches of each token, a norm whose weights are offsets from 1, and a matrix [hidden, text]."""

    def __init__(self, making: TowerMaking, hidden: int, side: int, along: int, eps: float, name: str) -> None:
        """along: tokens by each side."""
        self._making, self._hidden, self._eps, self._name = making, hidden, eps, name
        self._side, self._along = side, along
        self._norm: dict[str, Tensor] = {}
        self._linear: dict[str, Linear] = {}

    def parameters(self) -> ParameterTable:
        making, shape = self._making, (self._hidden, self._making.text_size)
        return {
            f"{self._name}.mm_soft_emb_norm.weight": held(
                self._norm, "norm", shape[:1], torch.float32, lambda weight: weight + 1
            ),
            f"{self._name}.mm_input_projection_weight": held(self._linear, "linear", shape, making.dtype, self._packed),
        }

    def __call__(self, hidden: Tensor) -> Tensor:
        square = hidden.T.reshape(1, self._hidden, self._side, self._side)
        pooled = F.avg_pool2d(square, self._side // self._along).flatten(2)[0].T.contiguous()
        normed = self._making.backend.rms_norm(pooled, self._norm["norm"], self._eps)
        return self._linear["linear"](normed, NO_ADAPTERS)

    def _packed(self, weight: Tensor) -> Linear:
        return self._making.backend.pack_linear(weight.T.contiguous(), None)
