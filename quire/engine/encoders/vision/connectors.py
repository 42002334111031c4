"""What makes tokens of a square's patches: pixel shuffle (Laurençon et al., 2024), two linears (Liu et al., 2023),
average pooling (Gemma Team, 2025)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.encoders.encoder import activation_of
from quire.engine.encoders.vision.tower import TowerMaking
from quire.engine.errors import ModelError
from quire.engine.images.vision import TowerShape
from quire.engine.layers.norm import LayerNormWeights
from quire.engine.layers.parameters import ParameterTable, held, parameters_of
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
        return self._linear.packed(shuffled(hidden, self._side, self._side, self._scale), NO_ADAPTERS)


def shuffled(hidden: Tensor, rows: int, columns: int, scale: int) -> Tensor:
    """[rows * columns, hidden] to [tokens, scale * scale * hidden], row by row of each scale x scale patches."""
    squares = hidden.view(rows // scale, scale, columns // scale, scale, -1).transpose(1, 2)
    return squares.reshape(rows // scale * (columns // scale), -1).contiguous()


class TwoLinears(Connector):
    """Of each patch, with an activation between them."""

    def __init__(
        self,
        making: TowerMaking,
        hidden: int,
        act: str,
        name: str,
        *,
        bias: bool,
        skipped: int = 0,
        inner: int | None = None,
    ) -> None:
        """skipped: rows before the patches that are no tokens; inner: numbers between the two, where not as many as
        come out. Raises ModelError for an activation that is not computed."""
        kind, size = activation_of(act), inner or making.text_size
        if kind not in ("gelu", "gelu_tanh", "relu"):
            raise ModelError(f"model: config.json: projector_hidden_act: {act!r} is not served")
        self._activation, self._backend, self._skipped = Activation(kind), making.backend, skipped
        self._first = making.linear(hidden, f"{name}.linear_1", size, bias=bias)
        self._last = making.linear(size, f"{name}.linear_2", making.text_size, bias=bias)

    def parameters(self) -> ParameterTable:
        return self._first.parameters() | self._last.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:
        wide = self._first.packed(hidden[self._skipped :].contiguous(), NO_ADAPTERS)
        return self._last.packed(self._backend.activate(wide, self._activation), NO_ADAPTERS)


class ShuffledLinears:
    """scale x scale patches side by side go through a norm, if there is one, and two linears."""

    def __init__(
        self,
        making: TowerMaking,
        hidden: int,
        scale: int,
        act: str,
        name: str,
        *,
        inner: int | None = None,
        bias: bool = True,
        norm: bool = True,
    ) -> None:
        self._scale, self._backend, wide = scale, making.backend, hidden * scale**2
        self._norm = LayerNormWeights(f"{name}.layer_norm", wide, bias=True) if norm else None
        self._linears = TwoLinears(making, wide, act, name, bias=bias, inner=inner)

    def parameters(self) -> ParameterTable:
        return ({} if self._norm is None else self._norm.parameters()) | self._linears.parameters()

    def of(self, hidden: Tensor, rows: int, columns: int) -> Tensor:
        """[rows * columns, hidden] to [tokens, text_size]."""
        x, norm = shuffled(hidden, rows, columns, self._scale), self._norm
        return self._linears(x if norm is None else self._backend.layer_norm(x, norm.weight, norm.bias, 1e-5))


class ShuffledSquare(Connector):
    """The same of a square; a class token is left out."""

    def __init__(self, linears: ShuffledLinears, side: int) -> None:
        self._linears, self._side = linears, side

    def parameters(self) -> ParameterTable:
        return self._linears.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._linears.of(hidden[1:], self._side, self._side)


class ClassVector(Connector):
    """CLIP's vector of an image: its class token's, through a norm and a linear."""

    def __init__(self, making: TowerMaking, hidden: int, eps: float, norm: str, projection: str) -> None:
        self._backend, self._eps = making.backend, eps
        self._norm = LayerNormWeights(norm, hidden, bias=True)
        self._linear = making.linear(hidden, projection, making.text_size, bias=False)

    def parameters(self) -> ParameterTable:
        return self._norm.parameters() | self._linear.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:
        normed = self._backend.layer_norm(hidden[:1], self._norm.weight, self._norm.bias, self._eps)
        return self._linear.packed(normed, NO_ADAPTERS)


class AttentionPooled(Connector):
    """SigLIP's: what one learned query sees of the patches, and a feed-forward part (Lee et al., 2019)."""

    def __init__(self, making: TowerMaking, shape: TowerShape, name: str) -> None:
        """Raises ModelError for an activation that is not computed."""
        hidden, inner = shape.hidden_size, shape.intermediate_size
        if (kind := activation_of(shape.activation)) not in ("gelu", "gelu_tanh", "relu"):
            raise ModelError(f"model: config.json: hidden_act: {shape.activation!r} is not served")
        self._activation, self._backend, self._dtype = Activation(kind), making.backend, making.dtype
        self._name, self._shape = name, shape
        self._qkv = making.linear(hidden, f"{name}.attention.in_proj", 3 * hidden)
        self._out = making.linear(hidden, f"{name}.attention.out_proj", hidden)
        self._norm = LayerNormWeights(f"{name}.layernorm", hidden, bias=True)
        self._up = making.linear(hidden, f"{name}.mlp.fc1", inner)
        self._down = making.linear(inner, f"{name}.mlp.fc2", hidden)
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        table = {name.replace("in_proj.", "in_proj_"): each for name, each in self._qkv.parameters().items()}
        probe = held(self._weights, "probe", (1, 1, self._shape.hidden_size), self._dtype, lambda it: it.view(1, -1))
        others = parameters_of(self._out, self._norm, self._up, self._down)
        return table | others | {f"{self._name}.probe": probe}

    def __call__(self, hidden: Tensor) -> Tensor:
        q, _, _ = self._qkv.packed(self._weights["probe"], NO_ADAPTERS).chunk(3, dim=1)
        _, k, v = self._qkv.packed(hidden, NO_ADAPTERS).chunk(3, dim=1)
        q, k, v = (each.float().unflatten(1, (self._shape.num_heads, -1)).transpose(0, 1) for each in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1).to(hidden.dtype)
        x = self._out.packed(seen.contiguous(), NO_ADAPTERS)
        normed = self._backend.layer_norm(x, self._norm.weight, self._norm.bias, self._shape.eps)
        wide = self._backend.activate(self._up.packed(normed, NO_ADAPTERS), self._activation)
        return x + self._down.packed(wide, NO_ADAPTERS)


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

        def packed(weight: Tensor) -> Linear:
            return making.backend.pack_linear(weight.T.contiguous(), None)

        norm, linear = f"{self._name}.mm_soft_emb_norm.weight", f"{self._name}.mm_input_projection_weight"
        return {
            norm: held(self._norm, "weight", shape[:1], torch.float32, lambda weight: weight + 1),
            linear: held(self._linear, "weight", shape, making.dtype, packed),
        }

    def __call__(self, hidden: Tensor) -> Tensor:
        square = hidden.T.reshape(1, self._hidden, self._side, self._side)
        pooled = F.avg_pool2d(square, self._side // self._along).flatten(2)[0].T.contiguous()
        normed = self._making.backend.rms_norm(pooled, self._norm["weight"], self._eps)
        return self._linear["weight"](normed, NO_ADAPTERS)
