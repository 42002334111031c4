"""A step of decodes and prompts as two calls of attention: one query of each of many sequences fits other kernels than
many queries of a few do. In one call, a grid of the longest prompt's tiles for every decode has mostly empty blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.images.ahead import attend_ahead, serves
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


def by_parts(attend: Callable[[Tensor, AttentionMetadata], Tensor], q: Tensor, metadata: AttentionMetadata) -> Tensor:
    """What `attend` gives for queries [T, H, D], part by part where a step has parts."""
    if not metadata.parts:
        return attend(q, metadata)
    rows = q.split([len(part.positions) for part in metadata.parts])
    return torch.cat([attend(each, part) for each, part in zip(rows, metadata.parts, strict=True)])
