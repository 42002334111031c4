"""What all ways of streaming layers share: which layers are streamed, and which comes when.

Streamed layers take turns in a few slots of memory, each of the largest layer's size; a layer has the same slot always,
so its linears find their weights at addresses that never change. While a layer is computed, the next ones come. All
other layers are kept where they are multiplied. The bytes are those that were packed, so results have the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from quire.kernels.backend import Linear
from quire.kernels.streaming.weight_offloader import WeightOffloader

LayerSelector = Callable[[Sequence[int]], list[int]]
"""Of the bytes of each layer to those that are streamed, ascending. Raises ValueError where that cannot be."""


class LayerHooks:
    """Who a pass through the layers tells where it is. They are all there, where nothing else is said."""

    streamed_layers: Sequence[int] = ()
    """The layers that are streamed, ascending; known once the weights are settled."""

    def begin_pass(self) -> None:
        """A pass through the layers begins."""

    def enter_layer(self, layer: int) -> None:
        """The layer is computed next: its weights are there for what is computed from now on."""

    def leave_layer(self, layer: int) -> None:
        """It was computed, or what computes it is queued."""


class LayerStreamer(LayerHooks, WeightOffloader):
    """`finish_loading` raises ValueError as Choice does, too."""

    def __init__(self, choice: LayerSelector, slots: int) -> None:
        """slots: how many layers may be there, or on their way, at a time."""
        self._select_layers, self._num_slots = choice, slots
        self.streamed_layers = []
        self._stream_positions: dict[int, int] = {}

    def set_expected_layer_bytes(self, sizes: Sequence[int]) -> None:
        """Bytes of each layer's weights, about, before they are read. Raises ValueError as Choice does."""
        return None

    @abstractmethod
    def register_packed_linear(self, layer: int, linear: Linear) -> None:
        """A linear of this layer, among those that the process has, was packed."""

    def is_streamed(self, layer: int) -> bool:
        """False: it is kept."""
        return layer in self._stream_positions

    def slot_of(self, layer: int) -> int:
        """Of a layer that is streamed."""
        return self._stream_positions[layer] % self._num_slots

    def next_in_slot(self, layer: int) -> int | None:
        """The layer that has the same slot next in this pass; None: none has."""
        following = self._stream_positions[layer] + self._num_slots
        return self.streamed_layers[following] if following < len(self.streamed_layers) else None

    @property
    def initial_layers(self) -> Sequence[int]:
        """The layers that the slots begin with."""
        return self.streamed_layers[: self._num_slots]

    def choose_streamed_layers(self, sizes: Sequence[int]) -> None:
        """Which of the layers, of so many bytes each, are streamed."""
        self.streamed_layers = self._select_layers(sizes)
        self._stream_positions = {layer: place for place, layer in enumerate(self.streamed_layers)}
