from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.layers.parameters import EarlySliceAxes
from quire.engine.layers.shard import FULL_LINEAR, LinearSlice
from quire.kernels.backend import Backend, Linear, QuantizedEmbedding


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype
    early_slice_axes: EarlySliceAxes = "nothing"


class QuantizationScheme(ABC):
    @abstractmethod
    def linear_tensor_specs(
        self, linear: str, in_features: int, out_features: int, *, bias: bool
    ) -> dict[str, TensorSpec]:
        """Returns specs by name within the linear."""

    @abstractmethod
    def pack_linears(
        self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, LinearSlice], *, wide: bool
    ) -> Linear:
        """Fuse linears with the same input, in this order. `cuts` apply to axes that were not sliced on reading. With
        `wide`, for heads and routers, results are float32.
        """

    @abstractmethod
    def dense_weight(self, linear: str, tensors: dict[str, Tensor], cut: LinearSlice) -> Tensor:
        """Returns [out, in] in the model's dtype. `cut` applies to axes that were not sliced on reading."""

    @abstractmethod
    def embedding_tensor_spec(self, vocab_size: int, hidden_size: int) -> TensorSpec: ...

    @abstractmethod
    def pack_embedding(self, weight: Tensor, cut: LinearSlice = FULL_LINEAR, *, tied: bool) -> QuantizedEmbedding:
        """`tied`: the embedding is also the LM head. `cut` applies to axes that were not sliced on reading."""


class WrappedScheme(QuantizationScheme):
    def __init__(self, scheme: QuantizationScheme) -> None:
        self._scheme = scheme

    def linear_tensor_specs(
        self, linear: str, in_features: int, out_features: int, *, bias: bool
    ) -> dict[str, TensorSpec]:
        return self._scheme.linear_tensor_specs(linear, in_features, out_features, bias=bias)

    def pack_linears(
        self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, LinearSlice], *, wide: bool
    ) -> Linear:
        return self._scheme.pack_linears(linears, cuts, wide=wide)

    def dense_weight(self, linear: str, tensors: dict[str, Tensor], cut: LinearSlice) -> Tensor:
        return self._scheme.dense_weight(linear, tensors, cut)

    def embedding_tensor_spec(self, vocab_size: int, hidden_size: int) -> TensorSpec:
        return self._scheme.embedding_tensor_spec(vocab_size, hidden_size)

    def pack_embedding(self, weight: Tensor, cut: LinearSlice = FULL_LINEAR, *, tied: bool) -> QuantizedEmbedding:
        return self._scheme.pack_embedding(weight, cut, tied=tied)


class UnquantizedScheme(QuantizationScheme):
    """Casts floating-point weights to one dtype."""

    def __init__(self, backend: Backend, dtype: torch.dtype) -> None:
        self._backend = backend
        self._dtype = dtype

    def linear_tensor_specs(
        self, linear: str, in_features: int, out_features: int, *, bias: bool
    ) -> dict[str, TensorSpec]:
        weight = {"weight": TensorSpec((out_features, in_features), self._dtype, "all")}
        return weight | {"bias": TensorSpec((out_features,), self._dtype, "all")} if bias else weight

    def pack_linears(
        self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, LinearSlice], *, wide: bool
    ) -> Linear:
        weight = _concat_tensors([each["weight"] for each in linears.values()])
        return self._backend.pack_linear(weight, concat_present_biases(linears), wide=wide)

    def dense_weight(self, linear: str, tensors: dict[str, Tensor], cut: LinearSlice) -> Tensor:
        return tensors["weight"]

    def embedding_tensor_spec(self, vocab_size: int, hidden_size: int) -> TensorSpec:
        return TensorSpec((vocab_size, hidden_size), self._dtype, "all")

    def pack_embedding(self, weight: Tensor, cut: LinearSlice = FULL_LINEAR, *, tied: bool) -> QuantizedEmbedding:
        head = self._backend.pack_linear(weight, None, wide=True) if tied else None
        return QuantizedEmbedding(lambda ids: F.embedding(ids, weight), head)


def concat_present_biases(linears: Mapping[str, Mapping[str, Tensor]]) -> Tensor | None:
    biases = [each["bias"] for each in linears.values() if "bias" in each]
    return _concat_tensors(biases) if biases else None


def _concat_tensors(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
