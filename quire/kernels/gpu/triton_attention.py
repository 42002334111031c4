"""FlashAttention's tiling (Dao, 2023) over a paged KV cache. Row r of a tile is token r // GROUP with head r % GROUP of
a KV head. The online softmax runs in base 2.

With fixed splits, a row has the same bits from a decode (which stores splits, then reduces them) and from a prefill
(which merges splits in registers). For this, every multiply-add that a compiler might fuse is an explicit tl.fma, masks
change no bits, and unseen keys leave sums unchanged.

If RANKS is not 1, keys are those of this rank, numbered from 0, and PAGE is the rank's share of a page. A row's result,
which merge_ranks reads, is then D weighted values, the maximum in base 2 and the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.triton_kv_quantization import kv_codes_to_unscaled_floats

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _find_tile_sequence(query_start, num_seqs, tile, BLOCK_Q: tl.constexpr):
    """Sequence s starts at tile query_start[s] // BLOCK_Q + s. So each sequence has enough tiles, and the host need not
    compute their numbers.
    """
    low, high = num_seqs * 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(query_start + low) // BLOCK_Q + low)


@triton.jit
def num_local_tokens_before(position, rank, RANKS: tl.constexpr, PAGE: tl.constexpr):
    if RANKS == 1:
        return position
    else:
        inside = tl.minimum(tl.maximum(position % (RANKS * PAGE) - rank * PAGE, 0), PAGE)
        return position // (RANKS * PAGE) * PAGE + inside


@triton.jit
def local_to_global_position(key, rank, RANKS: tl.constexpr, PAGE: tl.constexpr):
    if RANKS == 1:
        return key
    else:
        return key // PAGE * (RANKS * PAGE) + rank * PAGE + key % PAGE


@triton.jit
def merge_softmax_parts(peak, total, acc, peak2, total2, acc2):
    """A part is (maximum in base 2, sum of weights, weighted values)."""
    top = tl.maximum(peak, peak2)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    keep, add = tl.exp2(peak - anchor), tl.exp2(peak2 - anchor)
    total = tl.fma(total, keep, total2 * add)
    if len(acc.shape) == 2:
        acc = tl.fma(acc, keep[:, None], acc2 * add[:, None])
    else:
        acc = tl.fma(acc, keep, acc2 * add)
    return top, total, acc


@triton.jit
def _add_sink_weight(peak, total, sinks, head, SINKS: tl.constexpr):
    if SINKS:
        total += tl.exp2(tl.fma(tl.load(sinks + head), _LOG2E, -peak))
    return total


@triton.jit
def _load_kv_rows(cache, row, inside, d, D: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr):
    """If MASKED, load 0 for rows that are not `inside`, because their page may be unwritten."""
    at = cache + row[:, None] + d[None, :]
    if MASKED and D != D_PAD:
        return tl.load(at, mask=inside[:, None] & (d[None, :] < D), other=0.0)
    elif MASKED:
        return tl.load(at, mask=inside[:, None], other=0.0)
    elif D != D_PAD:
        return tl.load(at, mask=d[None, :] < D, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _load_kv_scales(at, inside, MASKED: tl.constexpr):
    """Return the scale of each key or value, [BLOCK_N] float32."""
    if MASKED:
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.load(at).to(tl.float32)


@triton.jit
def _first_visible_position(position, window, WINDOWED: tl.constexpr):
    """WINDOWED is 1 for sliding windows, 2 for chunked windows."""
    return position // window * window if WINDOWED == 2 else position - window + 1


@triton.jit
def _online_softmax_step(
    peak, total, acc, q, position, begin, end, cache, rules,
    KV_WIDTH: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, HELD: tl.constexpr, RANKS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Process keys `begin` to `begin` + BLOCK_N. If MASKED, hide keys from `end` on, and from each query the keys that
    it may not see.
    """
    k_cache, v_cache, k_scales, v_scales, table, k_stride, v_stride = cache
    scale, value_scale, softcap, window, rank = rules
    d = tl.arange(0, D_PAD)
    key = begin + tl.arange(0, BLOCK_N)
    inside = key < end
    if PAGE % BLOCK_N == 0:
        page = tl.load(table + begin // PAGE).to(tl.int64)
    elif MASKED:
        page = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
    else:
        page = tl.load(table + key // PAGE).to(tl.int64)
    within = (key % PAGE) * KV_WIDTH
    k = _load_kv_rows(k_cache, page * k_stride + within, inside, d, D, D_PAD, MASKED)
    v = _load_kv_rows(v_cache, page * v_stride + within, inside, d, D, D_PAD, MASKED)
    k, v = kv_codes_to_unscaled_floats(k, HELD, q), kv_codes_to_unscaled_floats(v, HELD, q)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HELD == 1:
        beside = PAGE * KV_WIDTH // 2 + (key % PAGE) * (KV_WIDTH // D)
        scores *= _load_kv_scales(k_scales + page * (k_stride // 2) + beside, inside, MASKED)[None, :]
    to_base2 = scale * _LOG2E
    if SOFTCAP:
        tanh = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * to_base2 / softcap)) + 1.0)
        scores, to_base2 = softcap * tanh, 1.0 * _LOG2E
    if MASKED:
        place = local_to_global_position(key, rank, RANKS, PAGE)
        seen = place[None, :] <= position[:, None]
        if WINDOWED:
            seen = seen & (place[None, :] >= _first_visible_position(position, window, WINDOWED)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, 1) * to_base2)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    keep = tl.exp2(peak - anchor)
    weights = tl.exp2(tl.fma(scores, to_base2, -anchor[:, None]))
    total = tl.fma(total, keep, tl.sum(weights, 1))
    factors = value_scale + tl.zeros([BLOCK_N], tl.float32)
    if HELD == 1:
        factors = _load_kv_scales(v_scales + page * (v_stride // 2) + beside, inside, MASKED)
    if HELD and v.dtype == tl.float16:  # small weights would underflow
        v = (v.to(tl.float32) * factors[:, None]).to(v.dtype)
    elif HELD:
        weights *= factors[None, :]
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def _attend_key_range(
    q, position, begin, full, end, cache, rules,
    KV_WIDTH: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, SOFTCAP: tl.constexpr, HELD: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """begin is a multiple of BLOCK_N. Without a window, all rows see keys before `full`, so these need no mask."""
    peak = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    acc = tl.zeros([q.shape[0], D_PAD], tl.float32)
    masked = begin
    if not WINDOWED:
        masked = tl.maximum(begin, tl.minimum(full, end) // BLOCK_N * BLOCK_N)
        for at in range(begin, masked, BLOCK_N):
            peak, total, acc = _online_softmax_step(
                peak, total, acc, q, position, at, end, cache, rules,
                KV_WIDTH, D, D_PAD, PAGE, BLOCK_N, WINDOWED, SOFTCAP, HELD, RANKS, MASKED=False,
            )  # fmt: skip
    for at in range(masked, end, BLOCK_N):
        peak, total, acc = _online_softmax_step(
            peak, total, acc, q, position, at, end, cache, rules,
            KV_WIDTH, D, D_PAD, PAGE, BLOCK_N, WINDOWED, SOFTCAP, HELD, RANKS, MASKED=True,
        )  # fmt: skip
    return peak, total, acc


@triton.jit
def _load_query_tile(
    q, query_start, context_lens, num_seqs, window, rank,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_TOKEN: tl.constexpr, WINDOWED: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Return (sequence, queries [BLOCK_M, D_PAD], positions, row, filled, begin, full, end). `row` has indices in [T *
    HEADS]. `filled` [BLOCK_M, D_PAD] is a mask of real elements. The tile needs keys `begin` to `end`. Every query sees
    the keys before `full`, unless a window hides them.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    seq = tile
    if ONE_TOKEN:
        tile = 0
    else:
        seq, tile = _find_tile_sequence(query_start, num_seqs, tile, BLOCK_Q)
    start = tl.load(query_start + seq)
    queries = tl.load(query_start + seq + 1) - start
    before = tl.load(context_lens + seq) - queries
    packed, d = tl.arange(0, BLOCK_M), tl.arange(0, D_PAD)
    token = tile * BLOCK_Q + packed // GROUP
    row = (start + token) * HEADS + tl.program_id(1) * GROUP + packed % GROUP
    filled = ((packed < BLOCK_Q * GROUP) & (token < queries))[:, None] & (d[None, :] < D)
    queries_here = tl.minimum(queries - tile * BLOCK_Q, BLOCK_Q)
    queried = tl.load(q + row.to(tl.int64)[:, None] * D + d[None, :], mask=filled, other=0.0)
    full = before + tile * BLOCK_Q + 1
    end = tl.where(queries_here > 0, full - 1 + queries_here, 0)
    begin = 0
    if WINDOWED:
        begin = num_local_tokens_before(
            tl.maximum(_first_visible_position(full - 1, window, WINDOWED), 0), rank, RANKS, PAGE
        )
        begin = begin // BLOCK_N * BLOCK_N
    full, end = num_local_tokens_before(full, rank, RANKS, PAGE), num_local_tokens_before(end, rank, RANKS, PAGE)
    return seq, queried, before + token, row, filled, begin, full, end


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "window", "rank"],
    do_not_specialize_on_alignment=["query_start", "context_lens", "block_table"],
)
def attend(
    out, sinks, q, k_cache, v_cache, k_scales, v_scales, query_start, context_lens, block_table,
    table_stride, k_stride, v_stride, num_seqs, scale, value_scale, softcap, window, rank,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_TOKEN: tl.constexpr, WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, HELD: tl.constexpr, RANKS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """SPLIT: keys per partial softmax, or 0 to compute a single softmax."""
    seq, queried, position, row, filled, begin, full, end = _load_query_tile(
        q, query_start, context_lens, num_seqs, window, rank,
        HEADS, HEADS // KV_HEADS, D, D_PAD, PAGE, BLOCK_M, BLOCK_N, ONE_TOKEN, WINDOWED, RANKS,
    )  # fmt: skip
    head = tl.program_id(1) * D
    table = block_table + seq.to(tl.int64) * table_stride
    own = tl.program_id(1)
    cache = (k_cache + head, v_cache + head, k_scales + own, v_scales + own, table, k_stride, v_stride)
    rules = (scale, value_scale, softcap, window, rank)
    if SPLIT == 0:
        peak, total, acc = _attend_key_range(
            queried, position, begin, full, end, cache, rules,
            KV_HEADS * D, D, D_PAD, PAGE, BLOCK_N, WINDOWED, SOFTCAP, HELD, RANKS,
        )  # fmt: skip
    else:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total, acc = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, D_PAD], tl.float32)
        for origin in range(begin // SPLIT * SPLIT, end, SPLIT):
            peak2, total2, acc2 = _attend_key_range(
                queried, position, tl.maximum(begin, origin), full, tl.minimum(end, origin + SPLIT), cache, rules,
                KV_HEADS * D, D, D_PAD, PAGE, BLOCK_N, WINDOWED, SOFTCAP, HELD, RANKS,
            )  # fmt: skip
            peak, total, acc = merge_softmax_parts(peak, total, acc, peak2, total2, acc2)
    if RANKS != 1:
        at = out + row.to(tl.int64) * (D + 2)
        real = tl.max(filled.to(tl.int32), 1) > 0
        tl.store(at[:, None] + tl.arange(0, D_PAD)[None, :], acc, mask=filled)
        tl.store(at + D, peak, mask=real)
        tl.store(at + D + 1, total, mask=real)
    else:
        total = _add_sink_weight(peak, total, sinks, row % HEADS, SINKS)
        at = out + row.to(tl.int64)[:, None] * D + tl.arange(0, D_PAD)[None, :]
        tl.store(at, tl.div_rn(acc, total[:, None]).to(out.dtype.element_ty), mask=filled)


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "splits", "window", "rank"],
    do_not_specialize_on_alignment=["query_start", "context_lens", "block_table"],
)
def attend_splits(
    weighted, peaks, totals, q, k_cache, v_cache, k_scales, v_scales, query_start, context_lens, block_table,
    table_stride, k_stride, v_stride, num_seqs, splits, scale, value_scale, softcap, window, rank,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ONE_TOKEN: tl.constexpr, WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, HELD: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """SPLIT: keys per split, where split 0 begins at position 0. If SPLIT is 0, a tile's keys are divided into `splits`
    equal parts. Some parts may be empty, and their maximum is then -inf.
    """
    seq, queried, position, row, filled, begin, full, end = _load_query_tile(
        q, query_start, context_lens, num_seqs, window, rank,
        HEADS, HEADS // KV_HEADS, D, D_PAD, PAGE, BLOCK_M, BLOCK_N, ONE_TOKEN, WINDOWED, RANKS,
    )  # fmt: skip
    head, d = tl.program_id(1) * D, tl.arange(0, D_PAD)
    table = block_table + seq.to(tl.int64) * table_stride
    own = tl.program_id(1)
    cache = (k_cache + head, v_cache + head, k_scales + own, v_scales + own, table, k_stride, v_stride)
    if SPLIT:
        origin, length, first, count = 0, SPLIT, begin // SPLIT, tl.cdiv(end, SPLIT)
    else:
        origin, first, count = begin, 0, splits
        length = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_N) * BLOCK_N
    for split in range(first + tl.program_id(2), count, tl.num_programs(2)):
        low = origin + split * length
        peak, total, acc = _attend_key_range(
            queried, position, tl.maximum(begin, low), full, tl.minimum(end, low + length), cache,
            (scale, value_scale, softcap, window, rank),
            KV_HEADS * D, D, D_PAD, PAGE, BLOCK_N, WINDOWED, SOFTCAP, HELD, RANKS,
        )  # fmt: skip
        at = row.to(tl.int64) * splits + split
        real = tl.max(filled.to(tl.int32), 1) > 0
        tl.store(peaks + at, peak, mask=real)
        tl.store(totals + at, total, mask=real)
        tl.store(weighted + at[:, None] * D + d[None, :], acc, mask=filled)


@triton.jit
def _store_partial_softmax(at, peak, total, acc, d, D: tl.constexpr):
    """Store a rank's row of D + 2 elements: weighted values [D], maximum, sum."""
    tl.store(at + d, acc, mask=d < D)
    tl.store(at + D, peak)
    tl.store(at + D + 1, total)


@triton.jit(do_not_specialize=["splits"])
def reduce_even_splits(
    out, sinks, weighted, peaks, totals, splits, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    MOST_SPLITS: tl.constexpr, RANKS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """out is [T * HEADS, D], or [T * HEADS, D + 2] with ranks."""
    row = tl.program_id(0).to(tl.int64)
    split, d = tl.arange(0, MOST_SPLITS), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = split < splits
    peak = tl.load(peaks + row * splits + split, mask=inside, other=float("-inf"))
    total = tl.load(totals + row * splits + split, mask=inside, other=0.0)
    at = weighted + (row * splits + split)[:, None] * D + d[None, :]
    acc = tl.load(at, mask=inside[:, None] & (d[None, :] < D), other=0.0)
    top = tl.max(peak, 0)
    anchor = top
    if RANKS != 1:  # a rank may have no keys
        anchor = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(peak - anchor)
    whole, weighted_sum = tl.sum(total * weight, 0), tl.sum(acc * weight[:, None], 0)
    if RANKS != 1:
        _store_partial_softmax(out + row * (D + 2), top, whole, weighted_sum, d, D)
    else:
        result = weighted_sum / _add_sink_weight(top, whole, sinks, row % HEADS, SINKS)
        tl.store(out + row * D + d, result.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["splits", "window", "rank"], do_not_specialize_on_alignment=["positions"])
def reduce_fixed_splits(
    out, sinks, weighted, peaks, totals, positions, splits, window, rank, HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PAGE: tl.constexpr, WINDOWED: tl.constexpr, SPLIT: tl.constexpr, RANKS: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Merge splits in the order of keys, as `attend` does."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    position = tl.load(positions + row // HEADS).to(tl.int32)
    first = 0
    if WINDOWED:
        first = (
            num_local_tokens_before(
                tl.maximum(_first_visible_position(position, window, WINDOWED), 0), rank, RANKS, PAGE
            )
            // SPLIT
        )
    peak, total, acc = float("-inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)
    for split in range(first, tl.cdiv(num_local_tokens_before(position + 1, rank, RANKS, PAGE), SPLIT)):
        at = row * splits + split
        part = tl.load(weighted + at * D + d, mask=d < D, other=0.0)
        peak, total, acc = merge_softmax_parts(peak, total, acc, tl.load(peaks + at), tl.load(totals + at), part)
    if RANKS != 1:
        _store_partial_softmax(out + row * (D + 2), peak, total, acc, d, D)
    else:
        total = _add_sink_weight(peak, total, sinks, row % HEADS, SINKS)
        tl.store(out + row * D + d, tl.div_rn(acc, total).to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["rows"])
def merge_ranks(
    out, sinks, parts, rows, HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, RANKS: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Merge parts [RANKS, rows, D + 2] to out [rows, D]. Rows are T * HEADS."""
    row, d = tl.program_id(0).to(tl.int64), tl.arange(0, D_PAD)
    peak, total, acc = float("-inf"), 0.0, tl.zeros([D_PAD], tl.float32)
    for rank in range(RANKS):
        at = parts + (rank * rows + row) * (D + 2)
        part = tl.load(at + d, mask=d < D, other=0.0)
        peak, total, acc = merge_softmax_parts(peak, total, acc, tl.load(at + D), tl.load(at + D + 1), part)
    total = _add_sink_weight(peak, total, sinks, row % HEADS, SINKS)
    tl.store(out + row * D + d, tl.div_rn(acc, total).to(out.dtype.element_ty), mask=d < D)
