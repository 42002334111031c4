"""The table of token embeddings, which may be the output head as well, and that of learned positions."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.engine.layers.adapters import EMBEDDING, HEAD, Adapters
from quire.engine.layers.parameters import Parameter, ParameterTable, held
from quire.engine.layers.schemes import Scheme
from quire.engine.layers.shard import WHOLE, Shard
from quire.kernels.backend import Linear, LinearContext, Table

_NAME, POSITIONS = f"{EMBEDDING}.weight", "model.embed_positions"


class Embedding:
    """Fill it by way of `parameters()` before use."""

    def __init__(
        self,
        scheme: Scheme,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: bool,
        looks_up: bool = True,
        scale: float,
        dtype: torch.dtype,
        adapters: Adapters | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        """tied: it is the head as well; looks_up: somebody asks for rows; scale: what embeddings are multiplied by, in
        their dtype; adapters: where the head gets room for some, if it does, and who adds those of embeddings; shard:
        whose part of the vocabulary it has."""
        self._shard, self._cut = shard, shard.outs(vocab_size)
        self._vocab_size, self._hidden_size = vocab_size, hidden_size
        self._adapters = adapters
        self._scheme = scheme
        self._stored = scheme.table(vocab_size, hidden_size)
        self._tied, self._looks_up = tied, looks_up
        self.scale = torch.tensor(scale, dtype=dtype).item()  # rounded to the weights' dtype, as Gemma was trained
        self._table: Table | None = None
        self._head: Linear | None = None

    def parameters(self) -> ParameterTable:
        stored = self._stored
        return {_NAME: Parameter(stored.shape, stored.dtype, self._put, partial(self._cut.early, which=stored.early))}

    def look_up(self, token_ids: Tensor, context: LinearContext) -> Tensor:
        """[T] to [T, hidden], the caller's own."""
        x = self.rows(token_ids)
        if self._adapters is not None:
            x = self._adapters.embed(x, token_ids, context)
        return x if self.scale == 1 else x.mul_(self.scale)

    def rows(self, token_ids: Tensor) -> Tensor:
        """The same, not scaled."""
        assert self._table is not None, "weights are not loaded"
        if (own := self._cut.outs) is None:
            return self._table.look_up(token_ids)
        places = token_ids - own.start
        here = places.clamp(0, len(own) - 1)
        return self._shard.sum(self._table.look_up(here).masked_fill_((places != here)[:, None], 0))

    @property
    def head(self) -> Linear:
        """Logits by the same weight, float32, where it is tied; of the rank's part of the vocabulary."""
        assert self._head is not None, "it is not the head, or its weights are not loaded"
        return self._head

    def _put(self, tensor: Tensor) -> None:
        table = self._scheme.pack_table(tensor, self._cut, tied=self._tied)
        self._table, self._head = table if self._looks_up else None, table.project
        if self._head is not None and self._adapters is not None:
            sizes = {HEAD: self._vocab_size}, self._hidden_size
            self._head = self._adapters.adapted(self._head, *sizes, {HEAD: self._cut}, wide=True)


class Positions:
    """A learned table of positions, which is added to the embeddings. Fill it by way of `parameters()` before use."""

    def __init__(self, count: int, hidden_size: int, dtype: torch.dtype) -> None:
        self._shape, self._dtype = (count, hidden_size), dtype
        self._table: dict[str, Tensor] = {}

    def parameters(self) -> ParameterTable:
        return {f"{POSITIONS}.weight": held(self._table, POSITIONS, self._shape, self._dtype)}

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """To embeddings [T, hidden], the caller's own."""
        return x.add_(F.embedding(positions, self._table[POSITIONS]))
