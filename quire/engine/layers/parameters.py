"""How checkpoint tensors reach a model: a table of names, each with the shape it must have and where it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

EarlySliceAxes = Literal["nothing", "outputs", "all"]
"""What of a rank's part of a linear is cut out when a tensor is read: which of its axes. The rest is cut when the
tensors of the linear are put together."""


def identity(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class LoadableParameter:
    """One tensor of the checkpoint, still to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Floating-point tensors are cast to it when they are read; any other must be stored as it."""
    weight_loader: Callable[[Tensor], None]
    """Takes the tensor, of this dtype and on the model's device."""
    slice_tensor: Callable[[Tensor], Tensor] = identity
    """What is read of it; `weight_loader` takes that."""

    def combine_weight_loaders(self, other: LoadableParameter) -> LoadableParameter:
        """Of two parts, to which the same goes."""
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
    """A tensor of the checkpoint, of which `weights[key]` becomes what `transform` returns. `slice_tensor`: as
    Parameter has it."""

    def store_tensor(tensor: Tensor) -> None:
        weights[key] = transform(tensor)

    return LoadableParameter(shape, dtype, store_tensor, slice_tensor)


def make_row_slicer(rows: range) -> Callable[[Tensor], Tensor]:
    """A cut that takes these rows of the first axis."""
    return partial(torch.narrow, dim=0, start=rows.start, length=len(rows))


class Parametrized(Protocol):
    def parameters(self) -> ParameterTable: ...


def merge_parameters(*parts: Parametrized | None) -> ParameterTable:
    """The parameters of all parts together. None has no parameters."""
    return {name: each for part in parts if part is not None for name, each in part.parameters().items()}
