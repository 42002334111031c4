"""Variants of triton_attention.py's kernels for one key that all heads share: L elements, which are also the value, and
R rotated elements. A tile's rows are (query, head) pairs in q's order, so its size need not be a multiple of the head
count.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.triton_attention import local_to_global_position, merge_softmax_parts, num_local_tokens_before
from quire.kernels.gpu.triton_kv_quantization import kv_codes_to_unscaled_floats

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def find_tile_sequence(query_start, num_seqs, tile, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Sequence s starts at tile query_start[s] * HEADS // BLOCK_M + s. So each sequence has enough tiles, and the host
    need not compute their numbers.
    """
    low, high = num_seqs * 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) * HEADS // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(query_start + low) * HEADS // BLOCK_M + low)


@triton.jit
def _load_latent_rows(at, inside, d, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr):
    """Returns 0 for rows that are not `inside`, because their page may be unwritten."""
    if SIZE != SIZE_PAD:
        return tl.load(at, mask=inside[:, None] & (d[None, :] < SIZE), other=0.0)
    else:
        return tl.load(at, mask=inside[:, None], other=0.0)


@triton.jit
def _load_page_ids(table, begin, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns a scalar if BLOCK_N divides PAGE, because then a tile of keys lies in one page; otherwise [BLOCK_N]."""
    if PAGE % BLOCK_N == 0:
        return tl.load(table + begin // PAGE, mask=begin < end, other=0)
    else:
        key = begin + tl.arange(0, BLOCK_N)
        return tl.load(table + key // PAGE, mask=key < end, other=0)


@triton.jit
def _latent_softmax_step(
    peak, total, acc, q_low, q_turned, position, begin, end, page, pages, rules,
    L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, HELD: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Process keys from `begin` up to `begin` + BLOCK_N, at most to `end`. page: from _load_page_ids."""
    cache, scales, stride = pages
    to_base2, value_scale, rank = rules
    d, r, key = tl.arange(0, L_PAD), tl.arange(0, R_PAD), begin + tl.arange(0, BLOCK_N)
    inside, page = key < end, page.to(tl.int64)
    own = cache + (page * stride + (key % PAGE) * (L + R))[:, None]
    low = kv_codes_to_unscaled_floats(_load_latent_rows(own + d[None, :], inside, d, L, L_PAD), HELD, q_low)
    turned = kv_codes_to_unscaled_floats(_load_latent_rows(own + L + r[None, :], inside, r, R, R_PAD), HELD, q_low)
    scores = tl.dot(q_low, tl.trans(low), input_precision="ieee")
    scores = tl.dot(q_turned, tl.trans(turned), scores, input_precision="ieee")
    factors = value_scale + tl.zeros([BLOCK_N], tl.float32)
    if HELD == 1:
        at = scales + page * (stride // 2) + PAGE * (L + R) // 2 + key % PAGE
        factors = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        scores *= factors[None, :]
    place = local_to_global_position(key, rank, RANKS, PAGE)
    scores = tl.where(place[None, :] <= position[:, None], scores, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, 1) * to_base2)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    keep = tl.exp2(peak - anchor)
    weights = tl.exp2(tl.fma(scores, to_base2, -anchor[:, None]))
    total = tl.fma(total, keep, tl.sum(weights, 1))
    if HELD and low.dtype == tl.float16:  # small weights would underflow
        low = (low.to(tl.float32) * factors[:, None]).to(low.dtype)
    elif HELD:
        weights *= factors[None, :]
    acc = tl.dot(weights.to(low.dtype), low, acc * keep[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def _attend_key_range(
    q_low, q_turned, position, begin, end, table, pages, rules,
    L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, HELD: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Loads page ids one tile ahead, because Triton prefetches latents only if their address does not depend on a load
    in the same iteration. A separate unmasked loop would cost registers and instruction fetches.
    """
    peak = tl.full([q_low.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q_low.shape[0]], tl.float32)
    acc = tl.zeros([q_low.shape[0], L_PAD], tl.float32)
    page = _load_page_ids(table, begin, end, PAGE, BLOCK_N)
    for at in range(begin, end, BLOCK_N):
        ahead = _load_page_ids(table, at + BLOCK_N, end, PAGE, BLOCK_N)
        peak, total, acc = _latent_softmax_step(
            peak, total, acc, q_low, q_turned, position, at, end, page, pages, rules,
            L, L_PAD, R, R_PAD, PAGE, BLOCK_N, HELD, RANKS,
        )  # fmt: skip
        page = ahead
    return peak, total, acc


@triton.jit
def _load_query_tile(
    q, query_start, context_lens, num_seqs, rank,
    HEADS: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, ONE_TOKEN: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Return (sequence, q's latent part, q's rotated part, positions, indices in [T * HEADS], mask of real rows, end of
    the keys).
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a prompt's last tiles see the most keys, so they start first
    if ONE_TOKEN:
        TILES: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
        seq, tile = tile // TILES, tile % TILES
    else:
        seq, tile = find_tile_sequence(query_start, num_seqs, tile, HEADS, BLOCK_M)
    start = tl.load(query_start + seq)
    queries = tl.load(query_start + seq + 1) - start
    before = tl.load(context_lens + seq) - queries
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real, row = packed < queries * HEADS, start.to(tl.int64) * HEADS + packed
    d, r = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    at = q + row[:, None] * (L + R)
    q_low = tl.load(at + d[None, :], mask=real[:, None] & (d[None, :] < L), other=0.0)
    q_turned = tl.load(at + L + r[None, :], mask=real[:, None] & (r[None, :] < R), other=0.0)
    last = tl.minimum(tile * BLOCK_M + BLOCK_M, queries * HEADS) - 1
    end = tl.where(tile * BLOCK_M < queries * HEADS, before + last // HEADS + 1, 0)
    return seq, q_low, q_turned, before + packed // HEADS, row, real, num_local_tokens_before(end, rank, RANKS, PAGE)


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "rank"],
    do_not_specialize_on_alignment=["query_start", "context_lens", "block_table"],
)
def attend_latents(
    out, q, cache, scales, query_start, context_lens, block_table, table_stride, stride, num_seqs, scale, value_scale,
    rank, HEADS: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_TOKEN: tl.constexpr, SPLIT: tl.constexpr,
    HELD: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """SPLIT: keys per partial softmax, or 0 to compute a single softmax."""
    seq, q_low, q_turned, position, row, real, end = _load_query_tile(
        q, query_start, context_lens, num_seqs, rank, HEADS, L, L_PAD, R, R_PAD, PAGE, BLOCK_M, ONE_TOKEN, RANKS
    )  # fmt: skip
    table, pages = block_table + seq.to(tl.int64) * table_stride, (cache, scales, stride)
    rules, d = (scale * _LOG2E, value_scale, rank), tl.arange(0, L_PAD)
    if SPLIT == 0:
        peak, total, acc = _attend_key_range(
            q_low, q_turned, position, 0, end, table, pages, rules, L, L_PAD, R, R_PAD, PAGE, BLOCK_N, HELD, RANKS
        )  # fmt: skip
    else:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total, acc = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, L_PAD], tl.float32)
        for origin in range(0, end, SPLIT):
            peak2, total2, acc2 = _attend_key_range(
                q_low, q_turned, position, origin, tl.minimum(end, origin + SPLIT), table, pages, rules,
                L, L_PAD, R, R_PAD, PAGE, BLOCK_N, HELD, RANKS,
            )  # fmt: skip
            peak, total, acc = merge_softmax_parts(peak, total, acc, peak2, total2, acc2)
    if RANKS != 1:
        at = out + row * (L + 2)
        tl.store(at[:, None] + d[None, :], acc, mask=real[:, None] & (d[None, :] < L))
        tl.store(at + L, peak, mask=real)
        tl.store(at + L + 1, total, mask=real)
    else:
        normalized = tl.div_rn(acc, total[:, None]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * L + d[None, :], normalized, mask=real[:, None] & (d[None, :] < L))


@triton.jit
def _attend_and_store_split(
    parts, kept, q_low, q_turned, position, split, length, end, table, pages, rules,
    L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, HELD: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """A split has up to `length` keys. `kept` has each row's index in [T * HEADS], and whether the row is real."""
    weighted, peaks, totals, splits = parts
    row, real = kept
    begin, d = split * length, tl.arange(0, L_PAD)
    peak, total, acc = _attend_key_range(
        q_low, q_turned, position, begin, tl.minimum(end, begin + length), table, pages, rules,
        L, L_PAD, R, R_PAD, PAGE, BLOCK_N, HELD, RANKS,
    )  # fmt: skip
    at = row * splits + split
    tl.store(peaks + at, peak, mask=real)
    tl.store(totals + at, total, mask=real)
    tl.store(weighted + at[:, None] * L + d[None, :], acc, mask=real[:, None] & (d[None, :] < L))


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "splits", "rank"],
    do_not_specialize_on_alignment=["query_start", "context_lens", "block_table"],
)
def attend_latent_splits(
    weighted, peaks, totals, q, cache, scales, query_start, context_lens, block_table, table_stride, stride, num_seqs,
    splits, scale, value_scale, rank,
    HEADS: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_TOKEN: tl.constexpr, SPLIT: tl.constexpr,
    HELD: tl.constexpr, RANKS: tl.constexpr, LOOPED: tl.constexpr,
):  # fmt: skip
    """If LOOPED, a program may have several splits. If each has only one, a loop would only take registers."""
    seq, q_low, q_turned, position, row, real, end = _load_query_tile(
        q, query_start, context_lens, num_seqs, rank, HEADS, L, L_PAD, R, R_PAD, PAGE, BLOCK_M, ONE_TOKEN, RANKS
    )  # fmt: skip
    table, pages = block_table + seq.to(tl.int64) * table_stride, (cache, scales, stride)
    rules = (scale * _LOG2E, value_scale, rank)
    if SPLIT:
        length, count = SPLIT, tl.cdiv(end, SPLIT)
    else:
        length, count = tl.cdiv(tl.cdiv(end, splits), BLOCK_N) * BLOCK_N, splits
    parts, row_and_mask = (weighted, peaks, totals, splits), (row, real)
    if LOOPED:
        for split in range(tl.program_id(1), count, tl.num_programs(1)):
            _attend_and_store_split(
                parts, row_and_mask, q_low, q_turned, position, split, length, end, table, pages, rules,
                L, L_PAD, R, R_PAD, PAGE, BLOCK_N, HELD, RANKS,
            )  # fmt: skip
    else:
        _attend_and_store_split(
            parts, row_and_mask, q_low, q_turned, position, tl.program_id(1), length, end, table, pages, rules,
            L, L_PAD, R, R_PAD, PAGE, BLOCK_N, HELD, RANKS,
        )  # fmt: skip
