"""Loads checkpoint tensors into modules. A module is ready once all its `parameters()` are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

EarlySliceAxes = Literal["nothing", "outputs", "all"]
"""The axes along which a rank's slice is taken when a tensor is read. The other axes are sliced when the tensor is
packed.
"""


def identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class LoadableParameter:
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Floating-point tensors are cast to this dtype. Other tensors must have it."""
    weight_loader: Callable[[Tensor], None]
    """Takes a tensor of `dtype` on the model's device."""
    slice_tensor: Callable[[Tensor], Tensor] = identity

    def combine_weight_loaders(self, other: LoadableParameter) -> LoadableParameter:
        assert (self.shape, self.dtype) == (other.shape, other.dtype)

        def load_both(tensor: Tensor) -> None:
            self.weight_loader(tensor)
            other.weight_loader(tensor)

        return replace(self, weight_loader=load_both)


ParameterTable = dict[str, LoadableParameter]


def make_loadable_parameter(
    weights: Any,
    key: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    transform: Callable[[Tensor], Any] = identity,
    slice_tensor: Callable[[Tensor], Tensor] = identity,
) -> LoadableParameter:
    def store_tensor(tensor: Tensor) -> None:
        weights[key] = transform(tensor)

    return LoadableParameter(shape, dtype, store_tensor, slice_tensor)


def make_row_slicer(rows: range) -> Callable[[Tensor], Tensor]:
    return partial(torch.narrow, dim=0, start=rows.start, length=len(rows))


class Parametrized(Protocol):
    def parameters(self) -> ParameterTable: ...


def merge_parameters(*parts: Parametrized | None) -> ParameterTable:
    return {name: each for part in parts if part is not None for name, each in part.parameters().items()}
