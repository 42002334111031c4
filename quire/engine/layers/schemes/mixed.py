from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quire.engine.layers.schemes import TensorSpec, UnquantizedScheme, concat_present_biases
from quire.engine.layers.shard import FULL_LINEAR, LinearSlice
from quire.kernels.backend import Backend, Linear, QuantizedEmbedding
from quire.kernels.quantized_tensors import QuantizedWeight


class LinearFormat(ABC):
    @abstractmethod
    def weight_tensor_specs(self, in_features: int, out_features: int) -> dict[str, TensorSpec]:
        """Returns specs by name within the linear."""

    @abstractmethod
    def to_backend_weight(self, tensors: dict[str, Tensor], linear: str) -> QuantizedWeight | Tensor:
        """Returns a dense [out, in] tensor if no backend format fits. Raises ModelError."""


class MixedScheme(UnquantizedScheme):
    """Each linear has its own format, or None if it is unquantized."""

    def __init__(
        self,
        backend: Backend,
        dtype: torch.dtype,
        format_of: Callable[[str], LinearFormat | None],
        embedding_format: LinearFormat | None = None,
    ) -> None:
        super().__init__(backend, dtype)
        self._embedding_format = embedding_format
        self._format_of = format_of

    def linear_tensor_specs(
        self, linear: str, in_features: int, out_features: int, *, bias: bool
    ) -> dict[str, TensorSpec]:
        specs = super().linear_tensor_specs(linear, in_features, out_features, bias=bias)
        if (linear_format := self._format_of(linear)) is None:
            return specs
        del specs["weight"]
        return specs | linear_format.weight_tensor_specs(in_features, out_features)

    def pack_linears(
        self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, LinearSlice], *, wide: bool
    ) -> Linear:
        weights = {name: self._convert_linear_shard(name, tensors, cuts[name]) for name, tensors in linears.items()}
        quantized = [each for each in weights.values() if not isinstance(each, Tensor)]
        if len(quantized) == len(weights):
            return self._backend.pack_quantized(quantized, concat_present_biases(linears), dtype=self._dtype, wide=wide)
        # If one part is unquantized, the other parts are dequantized.
        dense_linears = {name: tensors | {"weight": self._to_dense(weights[name])} for name, tensors in linears.items()}
        return super().pack_linears(dense_linears, cuts, wide=wide)

    def dense_weight(self, linear: str, tensors: dict[str, Tensor], cut: LinearSlice) -> Tensor:
        return self._to_dense(self._convert_linear_shard(linear, tensors, cut))

    def embedding_tensor_spec(self, vocab_size: int, hidden_size: int) -> TensorSpec:
        if self._embedding_format is None:
            return super().embedding_tensor_spec(vocab_size, hidden_size)
        return self._embedding_format.weight_tensor_specs(hidden_size, vocab_size)["weight"]

    def pack_embedding(self, weight: Tensor, cut: LinearSlice = FULL_LINEAR, *, tied: bool) -> QuantizedEmbedding:
        quantized: QuantizedWeight | Tensor = weight
        if self._embedding_format is not None:
            quantized = cut.slice_quantized(
                self._embedding_format.to_backend_weight({"weight": weight}, "the embedding"), "the embedding"
            )
        if isinstance(quantized, Tensor):
            return super().pack_embedding(quantized, tied=tied)
        return self._backend.pack_quantized_embedding(quantized, dtype=self._dtype, tied=tied)

    def _convert_linear_shard(
        self, linear: str, tensors: dict[str, Tensor], cut: LinearSlice
    ) -> QuantizedWeight | Tensor:
        linear_format = self._format_of(linear)
        return (
            tensors["weight"]
            if linear_format is None
            else cut.slice_quantized(linear_format.to_backend_weight(tensors, linear), linear)
        )

    def _to_dense(self, weights: QuantizedWeight | Tensor) -> Tensor:
        return (weights if isinstance(weights, Tensor) else weights.dequantize()).to(self._dtype)
