"""Linears that a checkpoint stores in different formats, each turned into a form that backends compute with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quire.engine.layers.schemes import Stored, Unquantized, joined_bias
from quire.engine.layers.shard import WHOLE_LINEAR, Cut
from quire.kernels.backend import Backend, Linear, Table
from quire.kernels.quantized import QuantizedWeight


class Format(ABC):
    """How one linear's weights are stored."""

    @abstractmethod
    def tensors(self, in_features: int, out_features: int) -> dict[str, Stored]:
        """What of a checkpoint makes the weights, by the name that follows the linear's own."""

    @abstractmethod
    def form(self, tensors: dict[str, Tensor], linear: str) -> QuantizedWeight | Tensor:
        """The weights of these tensors; [out, in] numbers where no form has them. `linear`: its name, for errors.
        Raises ModelError for tensors that contradict themselves."""


class MixedScheme(Unquantized):
    """Quantized linears and others, as `format_of` says it of each by its name; None: of floating-point numbers."""

    def __init__(
        self,
        backend: Backend,
        dtype: torch.dtype,
        format_of: Callable[[str], Format | None],
        table: Format | None = None,
    ) -> None:
        """`table`: of the embedding; None: it is of floating-point numbers."""
        super().__init__(backend, dtype)
        self._table = table
        self._format_of = format_of

    def tensors(self, linear: str, in_features: int, out_features: int, *, bias: bool) -> dict[str, Stored]:
        stored = super().tensors(linear, in_features, out_features, bias=bias)
        if (weights := self._format_of(linear)) is None:
            return stored
        del stored["weight"]
        return stored | weights.tensors(in_features, out_features)

    def pack(self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, Cut], *, wide: bool) -> Linear:
        weights = {name: self._weights(name, tensors, cuts[name]) for name, tensors in linears.items()}
        quantized = [each for each in weights.values() if not isinstance(each, Tensor)]
        if len(quantized) == len(weights):
            return self._backend.pack_quantized(quantized, joined_bias(linears), dtype=self._dtype, wide=wide)
        # Beside a part in full precision the others are computed in it too.
        whole = {name: tensors | {"weight": self._dense(weights[name])} for name, tensors in linears.items()}
        return super().pack(whole, cuts, wide=wide)

    def dense(self, linear: str, tensors: dict[str, Tensor], cut: Cut) -> Tensor:
        return self._dense(self._weights(linear, tensors, cut))

    def table(self, vocab_size: int, hidden_size: int) -> Stored:
        if self._table is None:
            return super().table(vocab_size, hidden_size)
        return self._table.tensors(hidden_size, vocab_size)["weight"]

    def pack_table(self, weight: Tensor, cut: Cut = WHOLE_LINEAR, *, tied: bool) -> Table:
        form: QuantizedWeight | Tensor = weight
        if self._table is not None:
            form = cut.form(self._table.form({"weight": weight}, "the embedding"), "the embedding")
        if isinstance(form, Tensor):
            return super().pack_table(form, tied=tied)
        return self._backend.pack_table(form, dtype=self._dtype, tied=tied)

    def _weights(self, linear: str, tensors: dict[str, Tensor], cut: Cut) -> QuantizedWeight | Tensor:
        weights = self._format_of(linear)
        return tensors["weight"] if weights is None else cut.form(weights.form(tensors, linear), linear)

    def _dense(self, weights: QuantizedWeight | Tensor) -> Tensor:
        return (weights if isinstance(weights, Tensor) else weights.dequantized()).to(self._dtype)
