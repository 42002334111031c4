"""Bidirectional attention for images: scaled_dot_product_attention over KV gathered from pages [token, KV head,
head_dim].
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES


def can_attend_bidirectional(k_cache: Tensor, softmax: AttentionParams) -> bool:
    plain = (
        softmax.softcap is None
        and softmax.relative_bias is None
        and softmax.sinks is None
        and softmax.value_dim is None
    )
    return softmax.lookahead is None and plain and k_cache.dtype not in QUANTIZED_KV_DTYPES


def attend_bidirectional(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
) -> Tensor:
    """Let all queries see all keys. A window limits how far back a query sees, and requires the queries to be the
    sequence's last tokens. The host waits only if metadata.query_key_lens is empty.
    """
    out = torch.empty_like(q)
    row = 0
    first = 0
    page = k_cache.shape[1]
    grouped = q.shape[1] != k_cache.shape[2]
    for (queries, keys), alike in groupby(metadata.query_key_lens or _sequence_query_key_lens(metadata)):
        count = len(list(alike))
        unseen = 0 if softmax.window is None else max(keys - queries - softmax.window + 1, 0) // page
        pages = metadata.block_table[first : first + count, unseen : -(-keys // page)].long()
        k, v = (cache[pages].flatten(1, 2)[:, : keys - unseen * page].transpose(1, 2) for cache in (k_cache, v_cache))
        rows = slice(row, row + count * queries)
        queries_by_sequence = q[rows].unflatten(0, (count, queries)).transpose(1, 2)
        seen = None
        if softmax.window is not None and keys > softmax.window:
            places = torch.arange(unseen * page, keys, device=q.device)
            seen = places > places[-queries:, None] - softmax.window
            k, v = _zero_unseen_kv(k, seen), _zero_unseen_kv(v, seen)
        attended = F.scaled_dot_product_attention(
            queries_by_sequence, k, v, attn_mask=seen, scale=softmax.scale, enable_gqa=grouped
        )
        out[rows] = attended.transpose(1, 2).flatten(0, 1)
        row, first = rows.stop, first + count
    return out


def _zero_unseen_kv(keys_or_values: Tensor, seen: Tensor) -> Tensor:
    """Zero what no query sees, because pages before a window may hold NaN, which a weight of 0 does not cancel."""
    return keys_or_values.masked_fill(~seen.any(0)[:, None], 0)


def _sequence_query_key_lens(metadata: AttentionMetadata) -> list[tuple[int, int]]:
    return list(zip(metadata.query_start.diff().tolist(), metadata.context_lens.tolist(), strict=True))
