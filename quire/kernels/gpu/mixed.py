"""A step of decodes and prompts as two calls of attention: one query of each of many sequences fits other kernels than
many queries of a few do. In one call, a grid of the longest prompt's tiles for every decode has mostly empty blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, LinearContext
from quire.kernels.gpu.images.ahead import attend_ahead, serves
from quire.kernels.recurrent.recurrence import Guesses, Sequences
from quire.kernels.reference import Reference
from quire.kernels.softmax import Softmax


@dataclass(frozen=True, slots=True)
class Division:
    """Where the decodes of a step end, and what the sequences behind them count from their own beginning."""

    decodes: int
    """The first sequences, of one query each; at least 1, and less than all."""
    query_start: np.ndarray  # [prompts + 1] int32
    key_start: np.ndarray  # the same of keys
    longest: tuple[int, int]
    """Contexts: of the decodes, and of those behind them."""
    whole: bool
    """Whether all keys of those behind are this step's own."""

    @classmethod
    def of(cls, counts: np.ndarray, contexts: np.ndarray, key_start: np.ndarray) -> Division | None:
        """Of sequences with so many queries and keys, each [S] int64; key_start [S + 1]. None: they are all alike."""
        ones = counts == 1
        decodes = len(counts) if ones.all() else int(ones.argmin())
        if not 0 < decodes < len(counts):
            return None
        query_start = np.zeros(len(counts) - decodes + 1, dtype=np.int32)
        query_start[1:] = counts[decodes:].cumsum()
        longest = int(contexts[:decodes].max()), int(contexts[decodes:].max())
        whole = bool((counts[decodes:] == contexts[decodes:]).all())
        return cls(decodes, query_start, key_start[decodes:] - key_start[decodes], longest, whole)

    def divide(
        self, metadata: AttentionMetadata, query_start: Tensor, key_start: Tensor, block_size: int
    ) -> AttentionMetadata:
        """The metadata with its two parts, as are those of the other groups of layers; query_start, key_start: ours on
        the device. For attention alone: what else a step says of its tokens, the parts do not repeat."""
        first, behind = slice(self.decodes), slice(self.decodes, None)
        pages = [-(-longest // block_size) for longest in self.longest]
        decodes = AttentionMetadata(
            query_start=metadata.query_start[: self.decodes + 1],
            context_lens=metadata.context_lens[first],
            key_start=metadata.key_start[: self.decodes + 1],
            block_table=metadata.block_table[first, : pages[0]],
            positions=metadata.positions[first],
            slots=metadata.slots[first],
            max_query_len=1,
            max_context_len=self.longest[0],
        )
        prompts = AttentionMetadata(
            query_start=query_start,
            context_lens=metadata.context_lens[behind],
            key_start=key_start,
            block_table=metadata.block_table[behind, : pages[1]],
            positions=metadata.positions[behind],
            slots=metadata.slots[behind],
            max_query_len=metadata.max_query_len,
            max_context_len=self.longest[1],
            whole=self.whole,
        )
        others = tuple(self.divide(each, query_start, key_start, block_size) for each in metadata.others)
        return replace(metadata, parts=(decodes, prompts), others=others)


class PagedAttention(Reference):
    """On pages of [token, KV head, head_dim]: a step of decodes and prompts is two calls, and torch's own attention
    computes what sees ahead of itself."""

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
    ) -> Tensor:
        if softmax.ahead == 0:
            return by_parts(lambda rows, part: self.attend(rows, k_cache, v_cache, part, softmax), q, metadata)
        if self.deterministic or not serves(k_cache, softmax):
            return super().paged_attention(q, k_cache, v_cache, metadata, softmax)
        return attend_ahead(q, k_cache, v_cache, metadata, softmax)

    @abstractmethod
    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
    ) -> Tensor:
        """As `paged_attention`, of a step that has no parts."""


def joined(
    decodes: AttentionMetadata, prompts: AttentionMetadata, linear: LinearContext = NO_ADAPTERS
) -> AttentionMetadata:
    """The metadata of a step of these two, which are its parts; linear: of all its tokens. It is made on the device
    alone, so that a CUDA graph can hold it."""
    first, keys, turns = len(decodes.context_lens), decodes.key_start, None
    if decodes.turns is not None and prompts.turns is not None:
        turns = torch.cat((decodes.turns, prompts.turns))
    slots = None
    if decodes.state_slots is not None and prompts.state_slots is not None:
        slots = torch.cat((decodes.state_slots, prompts.state_slots))
    return AttentionMetadata(
        query_start=torch.cat((decodes.query_start, prompts.query_start[1:] + first)),
        context_lens=torch.cat((decodes.context_lens, prompts.context_lens)),
        key_start=torch.cat((keys, prompts.key_start[1:] + keys[-1:])),
        block_table=torch.cat((decodes.block_table, prompts.block_table)),
        positions=torch.cat((decodes.positions, prompts.positions)),
        slots=torch.cat((decodes.slots, prompts.slots)),
        max_query_len=prompts.max_query_len,
        max_context_len=max(decodes.max_context_len, prompts.max_context_len),
        linear=linear,
        others=tuple(joined(*pair, linear) for pair in zip(decodes.others, prompts.others, strict=True)),
        state_slots=slots,
        turns=turns,
        sequences=_joined_sequences(decodes.sequences, prompts.sequences),
        parts=(decodes, prompts),
    )


def _joined_sequences(decodes: Sequences | None, prompts: Sequences | None) -> Sequences | None:
    if decodes is None or prompts is None or decodes.guesses is None or prompts.guesses is None:
        return None
    lens = [
        torch.cat(pair)
        for pair in (
            (decodes.context_lens, prompts.context_lens),
            (decodes.guesses.seen, prompts.guesses.seen),
            (decodes.guesses.known, prompts.guesses.known),
        )
    ]
    starts = torch.cat((decodes.query_start, prompts.query_start[1:] + len(decodes.context_lens)))
    return Sequences(starts, lens[0], Guesses(*lens[1:]))


def by_parts(attend: Callable[[Tensor, AttentionMetadata], Tensor], q: Tensor, metadata: AttentionMetadata) -> Tensor:
    """What `attend` gives for queries [T, H, D], part by part where a step has parts."""
    if not metadata.parts:
        return attend(q, metadata)
    rows = q.split([len(part.positions) for part in metadata.parts])
    return torch.cat([attend(each, part) for each, part in zip(rows, metadata.parts, strict=True)])
