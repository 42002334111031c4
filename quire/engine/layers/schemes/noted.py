"""A scheme whose linears are told to what streams their layer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quire.engine.layers.schemes import OtherScheme, Scheme
from quire.engine.layers.shard import Cut
from quire.kernels.backend import Linear
from quire.kernels.streaming.layers import StreamedLayers


class OfLayer(OtherScheme):
    def __init__(self, scheme: Scheme, streamed: StreamedLayers, layer: int) -> None:
        super().__init__(scheme)
        self._streamed, self._layer = streamed, layer

    def pack(self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, Cut], *, wide: bool) -> Linear:
        packed = super().pack(linears, cuts, wide=wide)
        self._streamed.note(self._layer, packed)
        return packed
