from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quire.engine.layers.schemes import QuantizationScheme, WrappedScheme
from quire.engine.layers.shard import LinearSlice
from quire.kernels.backend import Linear
from quire.kernels.streaming.layer_streamer import LayerStreamer


class StreamerRegisteringScheme(WrappedScheme):
    def __init__(self, scheme: QuantizationScheme, streamer: LayerStreamer, layer_index: int) -> None:
        super().__init__(scheme)
        self._streamer, self._layer_index = streamer, layer_index

    def pack_linears(
        self, linears: dict[str, dict[str, Tensor]], cuts: Mapping[str, LinearSlice], *, wide: bool
    ) -> Linear:
        packed = super().pack_linears(linears, cuts, wide=wide)
        self._streamer.register_packed_linear(self._layer_index, packed)
        return packed
