"""How checkpoint tensors reach a model: a table of names, each with the shape it must have and where it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of the checkpoint, still to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """Floating-point tensors are cast to it when they are read; any other must be stored as it."""
    put: Callable[[Tensor], None]
    """Takes the tensor, of this dtype and on the model's device."""


ParameterTable = dict[str, Parameter]
