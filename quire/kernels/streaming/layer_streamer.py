"""Streamed layers share a few memory slots, each of the largest layer's size. A layer always has the same slot, so its
linears find weights at fixed addresses. Bits do not change.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from quire.kernels.backend import Linear
from quire.kernels.streaming.weight_offloader import WeightOffloader

LayerSelector = Callable[[Sequence[int]], list[int]]
"""Maps each layer's bytes to the streamed layers, in ascending order. Raises ValueError if no choice fits."""


class LayerStreamer(WeightOffloader):
    """`finish_loading` also raises the selector's ValueError."""

    def __init__(self, choice: LayerSelector, slots: int) -> None:
        self._select_layers, self._num_slots = choice, slots
        self.streamed_layers: Sequence[int] = []
        """In ascending order. Known after loading."""
        self._stream_positions: dict[int, int] = {}

    def set_expected_layer_bytes(self, sizes: Sequence[int]) -> None:
        """Take the approximate sizes of layers before weights are read. Raises the selector's ValueError."""
        return None

    @abstractmethod
    def begin_pass(self) -> None:
        """Called before the first layer."""

    @abstractmethod
    def enter_layer(self, layer: int) -> None:
        """Called before a layer is computed. Work that is queued afterwards finds the layer's weights."""

    @abstractmethod
    def leave_layer(self, layer: int) -> None:
        """Called after a layer is computed, or after its work is queued."""

    @abstractmethod
    def register_packed_linear(self, layer: int, linear: Linear) -> None:
        """Called after a linear of this process is packed."""

    def is_streamed(self, layer: int) -> bool:
        return layer in self._stream_positions

    def slot_of(self, layer: int) -> int:
        """The layer must be streamed."""
        return self._stream_positions[layer] % self._num_slots

    def next_in_slot(self, layer: int) -> int | None:
        following = self._stream_positions[layer] + self._num_slots
        return self.streamed_layers[following] if following < len(self.streamed_layers) else None

    @property
    def initial_layers(self) -> Sequence[int]:
        return self.streamed_layers[: self._num_slots]

    def choose_streamed_layers(self, sizes: Sequence[int]) -> None:
        self.streamed_layers = self._select_layers(sizes)
        self._stream_positions = {layer: place for place, layer in enumerate(self.streamed_layers)}
