"""How a checkpoint stores the weights of linears, and how a backend packs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.layers.parameters import Early
from quire.engine.layers.shard import WHOLE_LINEAR, Cut
from quire.kernels.backend import Backend, Linear, Table


@dataclass(frozen=True, slots=True)
class Stored:
    """What a checkpoint must hold of one tensor; see Parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    early: Early = "nothing"
    """What a rank cuts out of it when it is read."""


class Scheme(ABC):
    @abstractmethod
    def tensors(self, linear: str, in_features: int, out_features: int, *, bias: bool) -> dict[str, Stored]:
        """What of a checkpoint makes this linear, by the name that follows the linear's own, such as "weight"."""

    @abstractmethod
    def pack(self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, Cut], *, wide: bool) -> Linear:
        """Linears of one input as one, their outputs side by side in this order; of each, by its name in the
        checkpoint, the tensors by theirs. Of each, what `cuts` says, where that was not cut out early.

        wide: the result is float32, of the same sums.
        """

    @abstractmethod
    def dense(self, linear: str, tensors: dict[str, Tensor], cut: Cut) -> Tensor:
        """The weights of a linear without a bias as numbers of the model's type, [out, in]; of these, what `cut` says,
        where that was not cut out early."""

    @abstractmethod
    def table(self, vocab_size: int, hidden_size: int) -> Stored:
        """What of a checkpoint makes the embedding."""

    @abstractmethod
    def pack_table(self, weight: Tensor, cut: Cut = WHOLE_LINEAR, *, tied: bool) -> Table:
        """The embedding, of what `table` says; tied: it is the head as well. Of it, what `cut` says, where that was not
        cut out early."""


class OtherScheme(Scheme):
    """Another scheme, but for what a class of this one does otherwise."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme

    def tensors(self, linear: str, in_features: int, out_features: int, *, bias: bool) -> dict[str, Stored]:
        return self._scheme.tensors(linear, in_features, out_features, bias=bias)

    def pack(self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, Cut], *, wide: bool) -> Linear:
        return self._scheme.pack(linears, cuts, wide=wide)

    def dense(self, linear: str, tensors: dict[str, Tensor], cut: Cut) -> Tensor:
        return self._scheme.dense(linear, tensors, cut)

    def table(self, vocab_size: int, hidden_size: int) -> Stored:
        return self._scheme.table(vocab_size, hidden_size)

    def pack_table(self, weight: Tensor, cut: Cut = WHOLE_LINEAR, *, tied: bool) -> Table:
        return self._scheme.pack_table(weight, cut, tied=tied)


class Unquantized(Scheme):
    """Floating-point weights of one dtype, whichever the checkpoint stores them in."""

    def __init__(self, backend: Backend, dtype: torch.dtype) -> None:
        self._backend = backend
        self._dtype = dtype

    def tensors(self, linear: str, in_features: int, out_features: int, *, bias: bool) -> dict[str, Stored]:
        weight = {"weight": Stored((out_features, in_features), self._dtype, "all")}
        return weight | {"bias": Stored((out_features,), self._dtype, "all")} if bias else weight

    def pack(self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, Cut], *, wide: bool) -> Linear:
        weight = _joined([each["weight"] for each in linears.values()])
        return self._backend.pack_linear(weight, joined_bias(linears), wide=wide)

    def dense(self, linear: str, tensors: dict[str, Tensor], cut: Cut) -> Tensor:
        return tensors["weight"]

    def table(self, vocab_size: int, hidden_size: int) -> Stored:
        return Stored((vocab_size, hidden_size), self._dtype, "all")

    def pack_table(self, weight: Tensor, cut: Cut = WHOLE_LINEAR, *, tied: bool) -> Table:
        head = self._backend.pack_linear(weight, None, wide=True) if tied else None
        return Table(lambda ids: F.embedding(ids, weight), head)


def joined_bias(linears: Mapping[str, Mapping[str, Tensor]]) -> Tensor | None:
    """That of linears side by side, as Scheme.pack has them."""
    biases = [each["bias"] for each in linears.values() if "bias" in each]
    return _joined(biases) if biases else None


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
