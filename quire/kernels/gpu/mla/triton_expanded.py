"""A variant of triton_attention.py's kernel with contiguous keys and values per head. Not batch-invariant."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.mla.triton_latents import find_tile_sequence

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_kv_rows(at, inside, d, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, MASKED: tl.constexpr):
    """Load [BLOCK_N, SIZE_PAD]. Columns from SIZE on are 0. If MASKED, rows that are not `inside` are 0 too."""
    if MASKED and SIZE != SIZE_PAD:
        return tl.load(at, mask=inside[:, None] & (d[None, :] < SIZE), other=0.0)
    elif MASKED:
        return tl.load(at, mask=inside[:, None], other=0.0)
    elif SIZE != SIZE_PAD:
        return tl.load(at, mask=d[None, :] < SIZE, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _expanded_softmax_step(
    peak, total, acc, q_plain, q_turned, m, begin, queries, plain, turned, v, to_base2,
    P: tl.constexpr, P_PAD: tl.constexpr, R: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Process keys `begin` to `begin` + BLOCK_N. If MASKED, hide from each query the keys after its position, and keys
    from number `queries` on, which do not exist.
    """
    n, p, e = begin + tl.arange(0, BLOCK_N), tl.arange(0, P_PAD), tl.arange(0, V_PAD)
    inside = n < queries
    k = _load_kv_rows(plain + n[:, None] * P + p[None, :], inside, p, P, P_PAD, MASKED)
    values = _load_kv_rows(v + n[:, None] * V + e[None, :], inside, e, V, V_PAD, MASKED)
    scores = tl.dot(q_plain, tl.trans(k), input_precision="ieee")
    if R != 0:
        r = tl.arange(0, R)
        t = _load_kv_rows(turned + n[:, None] * KEPT + r[None, :], inside, r, R, R, MASKED)
        scores = tl.dot(q_turned, tl.trans(t), scores, input_precision="ieee")
    if MASKED:
        scores = tl.where(n[None, :] <= m[:, None], scores, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, 1) * to_base2)
    keep = tl.exp2(peak - top)
    weights = tl.exp2(tl.fma(scores, to_base2, -top[:, None]))
    total = tl.fma(total, keep, tl.sum(weights, 1))
    acc = tl.dot(weights.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit(do_not_specialize=["tokens", "num_seqs"], do_not_specialize_on_alignment=["query_start"])
def attend_expanded(
    out, q, plain, turned, v, query_start, tokens, num_seqs, scale,
    HEADS: tl.constexpr, P: tl.constexpr, P_PAD: tl.constexpr, R: tl.constexpr, V: tl.constexpr, V_PAD: tl.constexpr,
    KEPT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """turned [T, KEPT] starts with the R (maybe 0) rotated elements of keys, which all heads share. All keys of a
    sequence are from this step.
    """
    head, tile = tl.program_id(0).to(tl.int64), tl.num_programs(1) - 1 - tl.program_id(1)
    seq, tile = find_tile_sequence(query_start, num_seqs, tile, 1, BLOCK_M)
    start = tl.load(query_start + seq).to(tl.int64)
    queries = (tl.load(query_start + seq + 1) - start).to(tl.int32)
    m, p, e = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, P_PAD), tl.arange(0, V_PAD)
    real, row = m < queries, (start + m) * HEADS + head
    at = q + row[:, None] * (P + R)
    q_plain = tl.load(at + p[None, :], mask=real[:, None] & (p[None, :] < P), other=0.0)
    q_turned = q_plain
    if R != 0:
        q_turned = tl.load(at + P + tl.arange(0, R)[None, :], mask=real[:, None], other=0.0)
    plain += (head * tokens + start) * P
    v += (head * tokens + start) * V
    turned += start * KEPT
    to_base2 = scale * _LOG2E
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total, acc = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, V_PAD], tl.float32)
    seen = tl.where(tile * BLOCK_M < queries, tile * BLOCK_M, 0)
    end = tl.where(tile * BLOCK_M < queries, tl.minimum(queries, tile * BLOCK_M + BLOCK_M), 0)
    full = seen // BLOCK_N * BLOCK_N
    for begin in range(0, full, BLOCK_N):
        peak, total, acc = _expanded_softmax_step(
            peak, total, acc, q_plain, q_turned, m, begin, queries, plain, turned, v, to_base2,
            P, P_PAD, R, V, V_PAD, KEPT, BLOCK_N, MASKED=False,
        )  # fmt: skip
    for begin in range(full, end, BLOCK_N):
        peak, total, acc = _expanded_softmax_step(
            peak, total, acc, q_plain, q_turned, m, begin, queries, plain, turned, v, to_base2,
            P, P_PAD, R, V, V_PAD, KEPT, BLOCK_N, MASKED=True,
        )  # fmt: skip
    normalized = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * V + e[None, :], normalized, mask=real[:, None] & (e[None, :] < V))
