"""Attention with an online softmax (Milakov and Gimelshein, 2018). Key tiles and product shapes are fixed, so a row's
bits do not depend on the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention.context_shard import ContextShard
from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata, CachePair
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES, dequantize_kv_pages

KEY_TILE = 128
QUERY_TILE = 16
LOG2E = 1.4426950408889634


class PartialSoftmax(NamedTuple):
    """Sums over keys for T tokens and H heads, in float32, or in float64 if q is float64."""

    weighted_values: Tensor  # [T, H, V]: sum of values times exp(score - max)
    max_scores: Tensor  # [T, H]; -inf if no key was seen
    exp_sums: Tensor  # [T, H], sum of exp(score - max)

    def normalize(self, sinks: Tensor | None) -> Tensor:
        """Return the attention output [T, H, V]."""
        totals = (
            self.exp_sums if sinks is None else self.exp_sums + torch.exp(sinks.to(self.max_scores) - self.max_scores)
        )
        return self.weighted_values / totals[:, :, None]

    def to_packed_tensor(self) -> Tensor:
        """Return [T, H, V + 2]: the weighted values, the maximum score times log2(e), and the sum."""
        return torch.cat((self.weighted_values, (self.max_scores * LOG2E)[:, :, None], self.exp_sums[:, :, None]), 2)


def merge_shard_attention(parts: Tensor, sinks: Tensor | None) -> Tensor:
    """Merge packed sums [ranks, T, H, V + 2] to [T, H, V]. Each row must have seen a key on some rank."""
    (first, *others) = parts[..., :-2]
    all_peaks = parts[..., -2].contiguous() / LOG2E
    totals = parts[..., -1]
    merged_softmax = PartialSoftmax(first, all_peaks[0], totals[0])
    for part in map(PartialSoftmax, others, all_peaks[1:], totals[1:]):
        top = torch.maximum(merged_softmax.max_scores, part.max_scores)
        anchor = top.masked_fill(top == -torch.inf, 0)
        keep, add = (
            torch.exp(merged_softmax.max_scores - anchor),
            torch.exp(part.max_scores - anchor),
        )  # not exp2, whose bits depend on an element's position
        weighted = merged_softmax.weighted_values * keep[:, :, None] + part.weighted_values * add[:, :, None]
        merged_softmax = PartialSoftmax(weighted, top, merged_softmax.exp_sums * keep + part.exp_sums * add)
    return merged_softmax.normalize(sinks)


def compute_partial_softmax(
    q: Tensor,
    caches: CachePair,
    metadata: AttentionMetadata,
    softmax: AttentionParams,
    shard: ContextShard,
    selected: Tensor | None = None,
) -> PartialSoftmax:
    """q is [T, H, D]. Sums exclude sinks. If `selected` (see Operations.select_keys) is None, all keys count."""
    tokens, heads = q.shape[:2]
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    softmax_sums = PartialSoftmax(
        q.new_empty((tokens, heads, softmax.value_dim or q.shape[2]), dtype=kind),
        *(q.new_empty((tokens, heads), dtype=kind) for _ in range(2)),
    )
    starts = metadata.query_start.tolist()
    for s, context in enumerate(metadata.context_lens.tolist()):
        pages = metadata.block_table[s, : -(-context // (shard.tokens_per_page * shard.world_size))].long()
        num_keys = shard.num_local_tokens_before(context)
        k = _read_cache_pages(caches[0], pages, softmax.kv_scales.key, q.dtype)[:num_keys]
        value_scale = softmax.kv_scales.value if softmax.value_dim is None else softmax.kv_scales.key
        v = _read_cache_pages(caches[1], pages, value_scale, q.dtype)[:num_keys, :, : softmax.value_dim]
        if softmax.window is not None:  # pages before the window may hold NaN, which a weight of 0 does not cancel
            unseen = shard.num_local_tokens_before(
                max(softmax.first_visible_key(context - (starts[s + 1] - starts[s])), 0)
            )
            k[:unseen], v[:unseen] = 0, 0
        for i in range(starts[s], starts[s + 1], QUERY_TILE):
            rows = slice(i, min(i + QUERY_TILE, starts[s + 1]))
            unselected = None if selected is None else _mask_unselected_keys(selected[rows], len(k))
            some = _attend_query_tile(q[rows], k, v, metadata.positions[rows], softmax, shard, unselected)
            for whole, part in zip(softmax_sums, some, strict=True):
                whole[rows] = part
    return softmax_sums


def _read_cache_pages(cache: Tensor, pages: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return [pages * tokens, K, D]. Quantized caches become float32, or float64 if `dtype` is float64."""
    if cache.dtype not in QUANTIZED_KV_DTYPES:
        return cache[pages].flatten(0, 1)
    some = cache.view(torch.uint8)[pages].view(cache.dtype)
    return dequantize_kv_pages(some, scale, torch.float64 if dtype == torch.float64 else torch.float32)


def _attend_query_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    softmax: AttentionParams,
    shard: ContextShard,
    unselected: Tensor | None,
) -> PartialSoftmax:
    """There are at most QUERY_TILE rows. They do not see the keys for which `unselected` [rows, keys] is True. None:
    they see all keys.
    """
    rows, heads, dim = q.shape
    kv_heads, compute = k.shape[1], torch.float64 if q.dtype == torch.float64 else torch.float32
    padded = F.pad(q.to(compute), (0, 0, 0, 0, 0, QUERY_TILE - rows))
    grouped = padded.view(QUERY_TILE, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    where = F.pad(positions, (0, QUERY_TILE - rows)).repeat(heads // kv_heads)[:, None]
    peak = torch.full((*grouped.shape[:2], 1), -torch.inf, dtype=compute, device=q.device)
    total, acc = torch.zeros_like(peak), grouped.new_zeros((*grouped.shape[:2], v.shape[2]))
    last = None if softmax.lookahead is None else int(positions.max()) + 1 + softmax.lookahead
    seen = len(k) if last is None else min(shard.num_local_tokens_before(last), len(k))
    for begin in range(0, seen, KEY_TILE):
        tile = slice(begin, begin + KEY_TILE)
        short = KEY_TILE - k[tile].shape[0]
        keys = F.pad(k[tile].to(compute), (0, 0, 0, 0, 0, short)).permute(1, 2, 0)
        values = F.pad(v[tile].to(compute), (0, 0, 0, 0, 0, short)).permute(1, 0, 2)
        scores = torch.bmm(grouped, keys) * softmax.scale
        if softmax.softcap is not None:
            scores = softmax.softcap * torch.tanh(scores / softmax.softcap)
        places = torch.arange(begin, begin + KEY_TILE, device=q.device)
        at = shard.global_positions(places)
        if softmax.relative_bias is not None:
            scores = scores + _bias_at_distances(softmax.relative_bias, at - where, kv_heads, rows=QUERY_TILE).to(
                scores
            )
        hidden = (places >= len(k)).expand(len(where), -1)
        if softmax.lookahead is not None:
            hidden = hidden | (at > where + softmax.lookahead)
        if softmax.window is not None:
            hidden = hidden | (at < softmax.first_visible_key(where))
        if unselected is not None:
            some = F.pad(unselected[:, tile], (0, short, 0, QUERY_TILE - rows))
            hidden = hidden | some.repeat(heads // kv_heads, 1)
        scores = scores.masked_fill(hidden, -torch.inf)
        above = torch.maximum(peak, scores.amax(-1, keepdim=True))
        anchor = above.masked_fill(above == -torch.inf, 0)
        weights, keep = torch.exp(scores - anchor), torch.exp(peak - anchor)
        total = total * keep + weights.sum(-1, keepdim=True)
        acc = acc * keep + torch.bmm(weights, values)
        peak = above
    return PartialSoftmax(
        _unpack_head_groups(acc, rows),
        _unpack_head_groups(peak, rows)[:, :, 0],
        _unpack_head_groups(total, rows)[:, :, 0],
    )


def _mask_unselected_keys(selected: Tensor, keys: int) -> Tensor:
    """Return [rows, keys] bool, True for keys not in `selected` [rows, top_k], which ends with -1 if there are fewer
    keys.
    """
    mask = selected.new_ones((len(selected), keys + 1), dtype=torch.bool)
    return mask.scatter_(1, selected.long().remainder(keys + 1), False)[:, :keys]


def _unpack_head_groups(x: Tensor, rows: int) -> Tensor:
    """Convert [kv_heads, group * QUERY_TILE, V] to [rows, heads, V]."""
    return x.unflatten(1, (-1, QUERY_TILE))[:, :, :rows].permute(2, 0, 1, 3).flatten(1, 2)


def _bias_at_distances(table: Tensor, distances: Tensor, kv_heads: int, *, rows: int) -> Tensor:
    """Look up AttentionParams.relative_bias for distances [group * rows, keys]. Returns [kv_heads, group * rows, keys].
    Each query head has `rows` rows.
    """
    longest = (table.shape[1] - 15) // 2
    columns = (distances + longest - 1).clamp(0, table.shape[1] - 1)
    group = len(distances) // rows
    heads = torch.arange(group, device=table.device).repeat_interleave(rows)[:, None]
    return torch.stack([table[first + heads, columns] for first in range(0, kv_heads * group, group)])
