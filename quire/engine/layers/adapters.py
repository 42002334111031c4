"""Where a model's adapters live: a slot of every linear, and of the embedding, for each adapter that is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from quire.engine.errors import AdapterError
from quire.engine.layers.shard import Cut
from quire.kernels.backend import AdaptedLinear, AdapterSlots, Backend, Delta, Linear, LinearContext

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter trained for one module: x @ down.T @ up.T is added to its outputs."""

    down: Tensor
    """[rank, in_features]; of an embedding [rank, vocab]."""
    up: Tensor
    """[out_features, rank], times the adapter's scale."""


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """One adapter in the form that the model's parts take."""

    linears: Mapping[int, Any]
    """By the linear's number: what its `pack` made."""
    embedding: tuple[Tensor, Tensor] | None
    """[vocab, rank] and [hidden, rank]."""


@dataclass(frozen=True, slots=True)
class _Site:
    """A module that may have a low-rank part: some outputs of a linear."""

    linear: int
    first: int
    cut: Cut


class Adapters:
    """Collects the linears of a model while it is loaded; then adapters may be packed, by any thread, and put into
    slots, between steps."""

    def __init__(self, backend: Backend, count: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """`count`: slots, from 1 on."""
        self.elsewhere: tuple[str, ...] = ()
        """What the names begin with of modules that other processes have."""
        self._backend = backend
        self._count = count
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = device
        self._linears: list[AdaptedLinear] = []
        self._sites: dict[str, _Site] = {}
        self._embeddings: dict[int, tuple[Tensor, Tensor]] = {}

    def adapted(
        self, linear: Linear, parts: Mapping[str, int], in_features: int, cuts: Mapping[str, Cut], *, wide: bool
    ) -> Linear:
        """The linear with room for adapters. `parts`: the modules that are joined in it, with their out_features; it
        has what `cuts` says of each."""
        sizes = [cuts[name].sizes(outs, in_features) for name, outs in parts.items()]
        owns, inner = tuple(own for own, _ in sizes), sizes[0][1]
        for name, first in zip(parts, accumulate(owns, initial=0), strict=False):
            self._sites[name] = _Site(len(self._linears), first, cuts[name])
        slots = AdapterSlots(self._count, inner, owns, self._max_rank, self._dtype, wide, self._device)
        made = self._backend.adapted(linear, slots)
        self._linears.append(made)
        return made

    @property
    def serves_embeddings(self) -> bool:
        """On a GPU, whose steps must not wait for the host, adapters have linears alone."""
        return self._device.type == "cpu"

    def pack(self, modules: Mapping[str, LowRank]) -> PackedAdapter:
        """An adapter's tensors by module. Any thread may call it."""
        deltas: dict[int, list[Delta]] = {}
        embedding = None
        for name, part in sorted(modules.items(), key=lambda item: self._order(item[0])):
            if f"{name}.".startswith(self.elsewhere):
                continue
            down, up = part.down.to(self._dtype), part.up.to(self._dtype)
            if name == EMBEDDING:
                embedding = (down.t().contiguous(), up)
            else:
                if (site := self._sites.get(name)) is None:  # a model that makes vectors alone has no head
                    raise AdapterError(f"{name}: the model is served without it")
                own = (each.contiguous() for each in site.cut.deltas(down, up))
                deltas.setdefault(site.linear, []).append(Delta(site.first, *own))
        return PackedAdapter({at: self._linears[at].pack(each) for at, each in deltas.items()}, embedding)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """From the next step on, the rows of this slot are this adapter's."""
        for number, linear in enumerate(self._linears):
            linear.put(slot, adapter.linears.get(number))
        self._embeddings.pop(slot, None)
        if adapter.embedding is not None:
            self._embeddings[slot] = adapter.embedding

    def embed(self, x: Tensor, token_ids: Tensor, context: LinearContext) -> Tensor:
        """Embeddings [T, hidden] with what the tokens' adapters add to them. Row by row, so that a row's bits depend on
        nothing else: few adapters have an embedding."""
        if context.adapters is None or not self._embeddings:
            return x
        for row, slot in enumerate(context.adapters.tolist()):
            if slot in self._embeddings:
                down, up = self._embeddings[slot]
                x[row] = (x[row].float() + up.float() @ down[token_ids[row]].float()).to(x.dtype)
        return x

    def _order(self, name: str) -> tuple[int, int]:
        site = self._sites.get(name)
        return (-1, 0) if site is None else (site.linear, site.first)
