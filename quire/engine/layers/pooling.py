"""One vector of each prompt, or of each of its tokens, however the prompt is cut into chunks and whatever shares its
steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.engine.checkpoint.pooling import Pooling
from quire.engine.core.scheduler_output import ScheduledRequest
from quire.engine.layers.heads import Head, Stage
from quire.engine.types import PoolingParams
from quire.kernels.backend import Backend
from quire.kernels.gpu.others import wide_type

VectorOf = Callable[[Tensor], Tensor]
"""Pooled hidden states [R, hidden] to vectors [R, size] float32."""


@dataclass(frozen=True, slots=True)
class PooledRow:
    """A step's part of a prompt whose vector is wanted."""

    row: ScheduledRequest
    begin: int
    """Where the row's tokens begin in the step."""
    length: int
    """Tokens of the whole prompt."""
    params: PoolingParams

    @property
    def ends(self) -> bool:
        return self.row.start + self.row.num_tokens == self.length


class Pooler:
    """Sums are float64, where the device has it, and grow token by token, so they do not depend on how a prompt is
    cut."""

    def __init__(
        self, pooling: Pooling, head: VectorOf, num_slots: int, hidden_size: int, device: torch.device
    ) -> None:
        self.pooling = pooling
        self._head = head
        self._kept = torch.empty(0)
        """[slots, hidden] of that type: the sum of a prompt's hidden states so far, or the first."""
        self._parts: dict[int, list[Tensor]] = {}
        """By slot: vectors [tokens, size] of a prompt's chunks so far, where each token has one."""
        if pooling.kind in ("mean", "cls"):
            self._kept = torch.zeros((num_slots, hidden_size), dtype=wide_type(device), device=device)

    def take(self, rows: Sequence[PooledRow], hidden: Tensor) -> Tensor:
        """The vectors [R, size] float32 of those rows that end their prompts, or of all tokens of these prompts. hidden
        [T, hidden]: of all of the step's tokens."""
        if self.pooling.kind == "none":
            return self._of_tokens(rows, hidden)
        ended = [each for each in rows if each.ends]
        if self.pooling.kind != "last":
            self._keep(rows, hidden)
        if not ended:
            return hidden.new_empty((0, self.pooling.size), dtype=torch.float32)
        if self.pooling.kind == "last":
            return self._head(hidden[[each.begin + each.row.num_tokens - 1 for each in ended]])
        pooled = self._kept[[each.row.slot for each in ended]]
        if self.pooling.kind == "mean":
            pooled /= torch.tensor([[each.length] for each in ended], dtype=pooled.dtype, device=pooled.device)
        return self._head(pooled)

    def _of_tokens(self, rows: Sequence[PooledRow], hidden: Tensor) -> Tensor:
        found = [hidden.new_empty((0, self.pooling.size), dtype=torch.float32)]
        for each in rows:
            if each.row.start == 0:
                self._parts[each.row.slot] = []
            parts = self._parts[each.row.slot]
            parts.append(self._head(hidden[each.begin : each.begin + each.row.num_tokens]).float())
            if each.ends:
                found += self._parts.pop(each.row.slot)
        return torch.cat(found)

    def _keep(self, rows: Sequence[PooledRow], hidden: Tensor) -> None:
        """Add the rows' tokens to their prompts' sums, or keep their prompts' first tokens."""
        kept = self._kept
        starting = [each for each in rows if each.row.start == 0]
        slots = [each.row.slot for each in starting]
        if self.pooling.kind == "cls":
            if starting:
                kept[slots] = hidden[[each.begin for each in starting]].to(kept.dtype)
        else:
            kept[slots] = 0
            owners = torch.tensor(
                [each.row.slot for each in rows for _ in range(each.row.num_tokens)], device=hidden.device
            )
            if len(owners) < len(hidden):
                spans = [np.arange(each.begin, each.begin + each.row.num_tokens) for each in rows]
                hidden = hidden[torch.from_numpy(np.concatenate(spans)).to(hidden.device)]
            kept.index_add_(0, owners, hidden.to(kept.dtype))


def vector_head(
    pooling: Pooling, backend: Backend, classifier: Callable[[int, int], Sequence[Stage]], hidden: int
) -> Head:
    """What follows the pooling: a classifier's linears, or the dense modules of an embedding model."""
    dense = [
        Stage(f"{each.folder}.linear", each.in_features, each.out_features, each.bias, each.activation)
        for each in pooling.dense
    ]
    scored = pooling.labels and pooling.score_tokens is None
    return Head(classifier(hidden, pooling.size) if scored else dense, backend)


def finished_rows(rows: Sequence[PooledRow], vectors: Tensor, pooling: Pooling) -> dict[str, bytes]:
    """By request: the answers of the rows that end, whose vectors float32 `Pooler.take` made."""
    ended = [each for each in rows if each.ends]
    found = list(vectors.numpy())
    if pooling.kind == "none":
        found = np.split(vectors.numpy(), np.cumsum([each.length for each in ended])[:-1])
    return {each.row.request_id: finished(found[i], each.params, pooling) for i, each in enumerate(ended)}


def finished(vector: np.ndarray, params: PoolingParams, pooling: Pooling) -> bytes:
    """A vector [size] float32, or those of tokens [tokens, size], as it is answered: embeddings cut and scaled to
    length 1, scores as probabilities."""
    wide = vector.astype(np.float64)
    if not pooling.labels:
        wide = wide[..., : params.dimensions]
        if pooling.normalize if params.activation is None else params.activation:
            wide /= np.maximum(np.sqrt(np.square(wide).sum(-1, keepdims=True)), 1e-12)
    elif params.activation is not False:
        wide = _activated(wide, pooling)
    return wide.astype("<f4").tobytes()


def _activated(scores: np.ndarray, pooling: Pooling) -> np.ndarray:
    if pooling.activation == "sigmoid":
        return 1 / (1 + np.exp(-scores))
    if pooling.activation == "softmax":
        weights = np.exp(scores - scores.max())
        return weights / weights.sum()
    return scores
