"""A scheme whose linears are told to what streams their layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from quire.engine.layers.schemes import Scheme, Stored
from quire.engine.layers.shard import WHOLE_LINEAR, Cut
from quire.kernels.backend import Linear, Table
from quire.kernels.streaming.layers import StreamedLayers


@dataclass(frozen=True, slots=True)
class OfLayer(Scheme):
    scheme: Scheme
    streamed: StreamedLayers
    layer: int

    def tensors(self, linear: str, in_features: int, out_features: int, *, bias: bool) -> dict[str, Stored]:
        return self.scheme.tensors(linear, in_features, out_features, bias=bias)

    def pack(self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, Cut], *, wide: bool) -> Linear:
        packed = self.scheme.pack(linears, cuts, wide=wide)
        self.streamed.note(self.layer, packed)
        return packed

    def dense(self, linear: str, tensors: dict[str, Tensor], cut: Cut) -> Tensor:
        return self.scheme.dense(linear, tensors, cut)

    def table(self, vocab_size: int, hidden_size: int) -> Stored:
        return self.scheme.table(vocab_size, hidden_size)

    def pack_table(self, weight: Tensor, cut: Cut = WHOLE_LINEAR, *, tied: bool) -> Table:
        return self.scheme.pack_table(weight, cut, tied=tied)
