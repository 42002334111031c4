"""Parameter names and shapes of unquantized checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from quire.engine.architecture.norm import NormSpec

ParameterShapes = dict[str, tuple[int, ...]]
CLIPPED_LINEAR_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""Names of the scalars that clamp a linear's inputs and outputs in Gemma 4's tower."""
LinearSizes = dict[str, tuple[int, int]]
"""(in_features, out_features) by name."""


def linear_shapes(names: Iterable[str], out_features: int, in_features: int, *, bias: bool = False) -> ParameterShapes:
    shapes = ParameterShapes()
    for name in names:
        shapes[f"{name}.weight"] = (out_features, in_features)
        if bias:
            shapes[f"{name}.bias"] = (out_features,)
    return shapes


def mlp_shapes(
    prefix: str, intermediate_size: int, hidden_size: int, *, gated: bool = True, bias: bool = False
) -> ParameterShapes:
    names = ("gate_proj", "up_proj") if gated else ("up_proj",)
    shapes = linear_shapes([f"{prefix}.{name}" for name in names], intermediate_size, hidden_size, bias=bias)
    return shapes | linear_shapes([f"{prefix}.down_proj"], hidden_size, intermediate_size, bias=bias)


def norm_shapes(sizes: Mapping[str, int], norm: NormSpec) -> ParameterShapes:
    shapes: ParameterShapes = {f"{name}.weight": (size,) for name, size in sizes.items()}
    if norm.is_layer_norm and norm.bias:
        shapes |= {f"{name}.bias": (size,) for name, size in sizes.items()}
    return shapes


def linear_sizes(shapes: Mapping[str, tuple[int, ...]]) -> LinearSizes:
    """Only linears have weights with two axes."""
    return {
        name.removesuffix(".weight"): (shape[1], shape[0])
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }


def count_parameters(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(prod(shape) for shape in shapes.values())
