"""Attention that sees keys behind a query's own position, as among an image's tokens and patches: torch's
scaled_dot_product_attention over keys and values that are gathered out of pages of [token, KV head, head_dim]."""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.backend import AttentionMetadata
from quire.kernels.kv_codes import KV_CODES
from quire.kernels.softmax import Softmax


def serves(k_cache: Tensor, softmax: Softmax) -> bool:
    """Whether `attend_ahead` computes it; the reference does all of it."""
    plain = softmax.softcap is None and softmax.bias is None and softmax.sinks is None and softmax.values is None
    return softmax.ahead is None and plain and k_cache.dtype not in KV_CODES


def attend_ahead(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax) -> Tensor:
    """As `Operations.paged_attention`, of queries that see all keys of their sequence; with a window, which counts from
    a query's own position back, they are the last ones of their sequence. Sequences of one shape that stand side by
    side are one call. Nothing waits for the device where the metadata knows its shapes."""
    out, row, first, page = torch.empty_like(q), 0, 0, k_cache.shape[1]
    grouped = q.shape[1] != k_cache.shape[2]
    for (queries, keys), alike in groupby(metadata.shapes or _shapes(metadata)):
        count = len(list(alike))
        unseen = 0 if softmax.window is None else max(keys - queries - softmax.window + 1, 0) // page
        pages = metadata.block_table[first : first + count, unseen : -(-keys // page)].long()
        k, v = (cache[pages].flatten(1, 2)[:, : keys - unseen * page].transpose(1, 2) for cache in (k_cache, v_cache))
        rows = slice(row, row + count * queries)
        own = q[rows].unflatten(0, (count, queries)).transpose(1, 2)
        seen = None
        if softmax.window is not None and keys > softmax.window:
            places = torch.arange(unseen * page, keys, device=q.device)
            seen = places > places[-queries:, None] - softmax.window
            k, v = _cleared(k, seen), _cleared(v, seen)
        found = F.scaled_dot_product_attention(own, k, v, attn_mask=seen, scale=softmax.scale, enable_gqa=grouped)
        out[rows] = found.transpose(1, 2).flatten(0, 1)
        row, first = rows.stop, first + count
    return out


def _cleared(kept: Tensor, seen: Tensor) -> Tensor:
    """[S, K, L, D] without what no query sees: pages before a window may hold NaN, whose part no weight of 0 is 0."""
    return kept.masked_fill(~seen.any(0)[:, None], 0)


def _shapes(metadata: AttentionMetadata) -> list[tuple[int, int]]:
    return list(zip(metadata.query_start.diff().tolist(), metadata.context_lens.tolist(), strict=True))
