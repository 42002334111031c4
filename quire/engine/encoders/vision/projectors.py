"""Projectors: pixel shuffle (Laurençon et al., 2024), MLP (Liu et al., 2023), average pooling (Gemma Team, 2025)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.architecture.encoder import parse_encoder_activation
from quire.engine.common.errors import ModelError
from quire.engine.encoders.vision.tower import TowerBuildContext
from quire.engine.families.base.vision.vision_spec import TowerShape
from quire.engine.layers.parameters import ParameterTable, make_loadable_parameter, merge_parameters
from quire.kernels.backend import NO_ADAPTERS, Linear
from quire.kernels.parameters.activation import Activation


class Projector(ABC):
    """Load weights through `parameters()` before use."""

    @abstractmethod
    def parameters(self) -> ParameterTable:
        """See Tower.parameters."""

    @abstractmethod
    def __call__(self, hidden: Tensor) -> Tensor:
        """Convert [patches, hidden], row-major after any class token, to [tokens, text_hidden_size]."""


class PixelShuffleProjector(Projector):
    """One linear turns scale x scale adjacent patches into a token."""

    def __init__(self, build_context: TowerBuildContext, side: int, scale: int, name: str) -> None:
        self._side, self._scale = side, scale
        self._linear = build_context.make_unquantized_linear(name)

    def parameters(self) -> ParameterTable:
        return self._linear.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._linear.packed_linear(pixel_shuffle(hidden, self._side, self._side, self._scale), NO_ADAPTERS)


def pixel_shuffle(hidden: Tensor, rows: int, columns: int, scale: int) -> Tensor:
    """Convert [rows * columns, hidden] to [tokens, scale² * hidden]. A token joins a square's patches row by row."""
    squares = hidden.view(rows // scale, scale, columns // scale, scale, -1).transpose(1, 2)
    return squares.reshape(rows // scale * (columns // scale), -1).contiguous()


class MLPProjector(Projector):
    def __init__(self, build_context: TowerBuildContext, act: str, name: str, *, num_skipped: int = 0) -> None:
        """The first `num_skipped` rows are not patches. Raises ModelError for an unsupported activation."""
        kind = parse_encoder_activation(act)
        if kind not in ("gelu", "gelu_tanh", "relu"):
            raise ModelError(f"model: config.json: projector_hidden_act: {act!r} is not served")
        self._activation = Activation(kind)
        self._backend = build_context.backend
        self._num_skipped = num_skipped
        self._first = build_context.make_unquantized_linear(f"{name}.linear_1")
        self._last = build_context.make_unquantized_linear(f"{name}.linear_2")

    def parameters(self) -> ParameterTable:
        return self._first.parameters() | self._last.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:
        wide = self._first.packed_linear(hidden[self._num_skipped :].contiguous(), NO_ADAPTERS)
        return self._last.packed_linear(self._backend.apply_activation(wide, self._activation), NO_ADAPTERS)


class PixelShuffleMLP:
    """Like PixelShuffleProjector, but with two linears and an optional norm."""

    def __init__(self, build_context: TowerBuildContext, scale: int, act: str, name: str) -> None:
        self._scale = scale
        self._backend = build_context.backend
        norm = f"{name}.layer_norm"
        self._norm = build_context.make_norm(norm) if f"{norm}.weight" in build_context.shapes else None
        self._linears = MLPProjector(build_context, act, name)

    def parameters(self) -> ParameterTable:
        return ({} if self._norm is None else self._norm.parameters()) | self._linears.parameters()

    def project_grid(self, hidden: Tensor, rows: int, columns: int) -> Tensor:
        """Convert [rows * columns, hidden] to [tokens, text_hidden_size]."""
        x, norm = pixel_shuffle(hidden, rows, columns, self._scale), self._norm
        return self._linears(x if norm is None else self._backend.layer_norm(x, norm.weight, norm.bias, 1e-5))


class SquarePixelShuffleProjector(Projector):
    def __init__(self, linears: PixelShuffleMLP, side: int) -> None:
        self._linears, self._side = linears, side

    def parameters(self) -> ParameterTable:
        return self._linears.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._linears.project_grid(hidden[1:], self._side, self._side)


class ClassTokenProjector(Projector):
    def __init__(self, build_context: TowerBuildContext, eps: float, norm: str, projection: str) -> None:
        self._backend, self._eps = build_context.backend, eps
        self._norm = build_context.make_norm(norm)
        self._linear = build_context.make_unquantized_linear(projection)

    def parameters(self) -> ParameterTable:
        return self._norm.parameters() | self._linear.parameters()

    def __call__(self, hidden: Tensor) -> Tensor:
        normed = self._backend.layer_norm(hidden[:1], self._norm.weight, self._norm.bias, self._eps)
        return self._linear.packed_linear(normed, NO_ADAPTERS)


class AttentionPoolingProjector(Projector):
    """SigLIP's pooling: a learned query attends to the patches (Lee et al., 2019)."""

    def __init__(self, build_context: TowerBuildContext, shape: TowerShape, name: str) -> None:
        """Raises ModelError for an unsupported activation."""
        if (kind := parse_encoder_activation(shape.activation)) not in ("gelu", "gelu_tanh", "relu"):
            raise ModelError(f"model: config.json: hidden_act: {shape.activation!r} is not served")
        self._activation = Activation(kind)
        self._build_context = build_context
        self._shape = shape
        self._probe = f"{name}.probe"
        self._qkv = build_context.make_unquantized_linear(f"{name}.attention.in_proj", separator="_")
        self._out = build_context.make_unquantized_linear(f"{name}.attention.out_proj")
        self._norm = build_context.make_norm(f"{name}.layernorm")
        self._up = build_context.make_unquantized_linear(f"{name}.mlp.fc1")
        self._down = build_context.make_unquantized_linear(f"{name}.mlp.fc2")
        self._weights: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        table = {name.replace("in_proj.", "in_proj_"): each for name, each in self._qkv.parameters().items()}
        probe = self._build_context.make_parameter(self._weights, self._probe, lambda it: it.view(1, -1))
        others = merge_parameters(self._out, self._norm, self._up, self._down)
        return table | others | {self._probe: probe}

    def __call__(self, hidden: Tensor) -> Tensor:
        backend = self._build_context.backend
        q, _, _ = self._qkv.packed_linear(self._weights[self._probe], NO_ADAPTERS).chunk(3, dim=1)
        _, k, v = self._qkv.packed_linear(hidden, NO_ADAPTERS).chunk(3, dim=1)
        q, k, v = (each.float().unflatten(1, (self._shape.num_heads, -1)).transpose(0, 1) for each in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1).to(hidden.dtype)
        x = self._out.packed_linear(attended.contiguous(), NO_ADAPTERS)
        normed = backend.layer_norm(x, self._norm.weight, self._norm.bias, self._shape.eps)
        wide = backend.apply_activation(self._up.packed_linear(normed, NO_ADAPTERS), self._activation)
        return x + self._down.packed_linear(wide, NO_ADAPTERS)


class AveragePoolingProjector(Projector):
    def __init__(
        self, build_context: TowerBuildContext, side: int, tokens_per_side: int, eps: float, norm: str, projection: str
    ) -> None:
        """`projection` is the name of an [in, out] weight."""
        self._build_context = build_context
        self._eps = eps
        self._norm_name, self._projection_name = norm, projection
        self._side, self._tokens_per_side = side, tokens_per_side
        self._norm: dict[str, Tensor] = {}
        self._linear: dict[str, Linear] = {}

    def parameters(self) -> ParameterTable:
        build_context = self._build_context
        norm, linear = self._norm_name, self._projection_name

        def pack_transposed(weight: Tensor) -> Linear:
            return build_context.backend.pack_linear(weight.T.contiguous(), None)

        norm_shape, shape = build_context.shapes[norm], build_context.shapes[linear]
        return {
            norm: make_loadable_parameter(self._norm, "weight", norm_shape, torch.float32, lambda weight: weight + 1),
            linear: make_loadable_parameter(self._linear, "weight", shape, build_context.dtype, pack_transposed),
        }

    def __call__(self, hidden: Tensor) -> Tensor:
        square = hidden.T.reshape(1, -1, self._side, self._side)
        pooled = F.avg_pool2d(square, self._side // self._tokens_per_side).flatten(2)[0].T.contiguous()
        normed = self._build_context.backend.rms_norm(pooled, self._norm["weight"], self._eps)
        return self._linear["weight"](normed, NO_ADAPTERS)
