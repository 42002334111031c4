"""Steps in forms that a graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.engine.models.decoder import Decoder, KVCache
from quire.engine.worker.inputs import Slots
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, LinearContext
from quire.kernels.gpu.mixed import joined

Observe = Callable[[Tensor, AttentionMetadata, Tensor, Sequence[Tensor]], Tensor]
"""As Heads.observe."""


class Forms:
    """What heads read beside the hidden states stands right of these."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        slots: Slots,
        taps: Sequence[int] = (),
        observe: Observe | None = None,
    ) -> None:
        """taps: the layers that heads read. observe: what such heads make of a step, behind its picks."""
        self._model, self._kv_cache, self._slots, self._taps = model, kv_cache, slots, taps
        self._observe = observe

    @property
    def width(self) -> int:
        return self._model.spec.hidden_size * (1 + len(self._taps))

    def decode(self, rows: Tensor, pages: int) -> Tensor:
        """One token per row: see Slots.decode_inputs."""
        return self._forward(*self._slots.decode_inputs(rows, pages))

    def small_step(self, rows: Tensor, pieces: Tensor, decodes: int, pages: int) -> Tensor:
        """The same of so many rows, and of parts of prompts behind them: see Slots.prompt_inputs."""
        return self._forward(*self._small(rows, pieces, decodes, pages))

    def decode_behind(self, rows: Tensor, hidden: Tensor, pages: int) -> Tensor:
        """What heads make of such a step, which has left `hidden`."""
        _, metadata = self._slots.decode_inputs(rows, pages, seen=False)
        return self._behind(rows, metadata, hidden)

    def small_behind(self, rows: Tensor, pieces: Tensor, decodes: int, pages: int, hidden: Tensor) -> Tensor:
        _, metadata = self._small(rows, pieces, decodes, pages, seen=False)
        return self._behind(rows, metadata, hidden)

    def _small(
        self, rows: Tensor, pieces: Tensor, decodes: int, pages: int, *, seen: bool = True
    ) -> tuple[Tensor, AttentionMetadata]:
        places, adapters = rows[:2], rows[2:]
        ids, first = self._slots.decode_inputs(places[:, :decodes], pages, seen=seen)
        others, behind = self._slots.prompt_inputs(places[:, decodes:], pieces, pages, seen=seen)
        linear = LinearContext.of(adapters[0]) if len(adapters) else NO_ADAPTERS
        return torch.cat((ids, others)), joined(first, behind, linear)

    def _forward(self, token_ids: Tensor, metadata: AttentionMetadata) -> Tensor:
        every = torch.arange(len(token_ids), device=token_ids.device)
        hidden, tapped = self._model.forward_tapped(token_ids, metadata, self._kv_cache, every, self._taps)
        return torch.cat((hidden, *tapped), dim=1) if tapped else hidden

    def _behind(self, rows: Tensor, metadata: AttentionMetadata, side_by_side: Tensor) -> Tensor:
        assert self._observe is not None
        hidden, *tapped = self.apart(side_by_side)
        return self._observe(rows[0], metadata, hidden, tapped)

    def apart(self, side_by_side: Tensor) -> list[Tensor]:
        """The hidden states, and what heads read."""
        count = 1 + len(self._taps)
        return [side_by_side] if count == 1 else [each.contiguous() for each in side_by_side.chunk(count, dim=1)]
