"""How a checkpoint stores the weights of linears, and how a backend packs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.backend import Backend, Linear


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint must hold of one tensor; see Parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Scheme(ABC):
    @abstractmethod
    def tensors(self, in_features: int, out_features: int, *, bias: bool) -> dict[str, Stored]:
        """What of a checkpoint makes a linear, by the name that follows the linear's own, such as "weight"."""

    @abstractmethod
    def pack(self, linears: Sequence[dict[str, Tensor]], *, wide: bool) -> Linear:
        """Linears of one input as one, their outputs side by side in this order; of each, the tensors by name.

        wide: the result is float32, of the same sums.
        """


class Unquantized(Scheme):
    """Floating-point weights of one dtype, whichever the checkpoint stores them in."""

    def __init__(self, backend: Backend, dtype: torch.dtype) -> None:
        self._backend = backend
        self._dtype = dtype

    def tensors(self, in_features: int, out_features: int, *, bias: bool) -> dict[str, Stored]:
        weight = {"weight": Stored((out_features, in_features), self._dtype)}
        return weight | {"bias": Stored((out_features,), self._dtype)} if bias else weight

    def pack(self, linears: Sequence[dict[str, Tensor]], *, wide: bool) -> Linear:
        weight = _joined([each["weight"] for each in linears])
        bias = _joined([each["bias"] for each in linears]) if "bias" in linears[0] else None
        return self._backend.pack_linear(weight, bias, wide=wide)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
