"""How checkpoint tensors reach a model: a table of names, each with the shape it must have and where it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Early = Literal["nothing", "outputs", "all"]
"""What of a rank's part of a linear is cut out when a tensor is read: which of its axes. The rest is cut when the
tensors of the linear are put together."""


def whole(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the checkpoint, still to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Floating-point tensors are cast to it when they are read; any other must be stored as it."""
    put: Callable[[Tensor], None]
    """Takes the tensor, of this dtype and on the model's device."""
    cut: Callable[[Tensor], Tensor] = whole
    """What is read of it; `put` takes that."""

    def shared(self, other: Parameter) -> Parameter:
        """Of two parts, to which the same goes."""
        assert (self.shape, self.dtype) == (other.shape, other.dtype)

        def put(tensor: Tensor) -> None:
            self.put(tensor)
            other.put(tensor)

        return replace(self, put=put)


ParameterTable = dict[str, Parameter]


def held(
    found: Any,
    key: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    make: Callable[[Tensor], Any] = whole,
    cut: Callable[[Tensor], Tensor] = whole,
) -> Parameter:
    """A tensor of the checkpoint, of which `found[key]` becomes what `make` returns. `cut`: as Parameter has it."""

    def put(tensor: Tensor) -> None:
        found[key] = make(tensor)

    return Parameter(shape, dtype, put, cut)


def rows_of(own: range) -> Callable[[Tensor], Tensor]:
    """A cut that takes these rows of the first axis."""
    return partial(torch.narrow, dim=0, start=own.start, length=len(own))


class Parametrized(Protocol):
    def parameters(self) -> ParameterTable: ...


def parameters_of(*parts: Parametrized | None) -> ParameterTable:
    """The parameters of all parts together. None has no parameters."""
    return {name: each for part in parts if part is not None for name, each in part.parameters().items()}
