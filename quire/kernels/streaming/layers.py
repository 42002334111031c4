"""What all ways of streaming layers share: which layers are streamed, and which comes when.

Streamed layers take turns in a few slots of memory, each of the largest layer's size; a layer has the same slot always,
so its linears find their weights at addresses that never change. While a layer is computed, the next ones come. All
other layers are kept where they are multiplied. The bytes are those that were packed, so results have the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from quire.kernels.backend import Linear
from quire.kernels.streaming.offload import Offload

Choice = Callable[[Sequence[int]], list[int]]
"""Of the bytes of each layer to those that are streamed, ascending. Raises ValueError where that cannot be."""


class Layers:
    """Who a pass through the layers tells where it is. They are all there, where nothing else is said."""

    order: Sequence[int] = ()
    """The layers that are streamed, ascending; known once the weights are settled."""

    def begin(self) -> None:
        """A pass through the layers begins."""

    def enter(self, layer: int) -> None:
        """The layer is computed next: its weights are there for what is computed from now on."""

    def leave(self, layer: int) -> None:
        """It was computed, or what computes it is queued."""


class StreamedLayers(Layers, Offload):
    """`settle` raises ValueError as Choice does, too."""

    def __init__(self, choice: Choice, slots: int) -> None:
        """slots: how many layers may be there, or on their way, at a time."""
        self._choice, self._count = choice, slots
        self.order = []
        self._places: dict[int, int] = {}

    def expect(self, sizes: Sequence[int]) -> None:
        """Bytes of each layer's weights, about, before they are read. Raises ValueError as Choice does."""
        return None

    @abstractmethod
    def note(self, layer: int, linear: Linear) -> None:
        """A linear of this layer, among those that the process has, was packed."""

    def is_streamed(self, layer: int) -> bool:
        """False: it is kept."""
        return layer in self._places

    def slot_of(self, layer: int) -> int:
        """Of a layer that is streamed."""
        return self._places[layer] % self._count

    def after(self, layer: int) -> int | None:
        """The layer that has the same slot next in this pass; None: none has."""
        following = self._places[layer] + self._count
        return self.order[following] if following < len(self.order) else None

    @property
    def first(self) -> Sequence[int]:
        """The layers that the slots begin with."""
        return self.order[: self._count]

    def choose_of(self, sizes: Sequence[int]) -> None:
        """Which of the layers, of so many bytes each, are streamed."""
        self.order = self._choice(sizes)
        self._places = {layer: place for place, layer in enumerate(self.order)}
