"""Delta rules and state spaces by chunks of 64 tokens, with matrix products. Bits differ from those of a
token-by-token computation, and depend on how a prompt is divided into steps.

G_i is the sum of log decays up to token i of a chunk, S the matrix before the chunk, and token i adds k_i d_i^T:
    readout       exp(G_i) q_i S + sum over j <= i of exp(G_i - G_j) (q_i k_j) d_j
    next matrix   exp(G) S + sum over j of exp(G - G_j) k_j d_j^T

For state spaces d_j is the step times x. For the delta rule d = (1 + A)^-1 beta (v - exp(G) k S), with
A_ij = beta_i exp(G_i - G_j) (k_i k_j) for j < i (Yang et al., 2024: Gated Delta Networks). Terms without S are
computed first, for all chunks at once.

A float32 operand is split into two bfloat16, which is about 100 times as exact as bfloat16 at twice the cost, or
three times if both operands are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.recurrent.triton_common import (
    SEQUENCE_POINTERS,
    load_sequence_bounds,
    softplus,
    uses_chunked_kernel,
)

RECURRENCE_CHUNK = 64
"""In tokens. Hopper's matrix products have 64 rows."""
_SIZE: tl.constexpr = tl.constexpr(RECURRENCE_CHUNK)


@triton.jit
def split_into_bfloat16_pair(x):
    """Return two bfloat16 numbers, whose sum differs from x by at most 2^-17 of x. Rounds with integers, because scalar
    conversions are slow.
    """
    high = ((x.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _chunk_sequence_and_index(number, decodes, seqs, query_start):
    """Sequence s after `decodes` has chunks from number query_start[s] // 64 + s on, so sequences share none. Some
    numbers may be unused.
    """
    row = 0
    for begin in range(0, seqs, 256):
        s = begin + tl.arange(0, 256)
        firsts = tl.load(query_start + decodes + s, mask=s < seqs, other=0) // _SIZE + s
        row += tl.sum(((s < seqs) & (firsts <= number)).to(tl.int32), 0)
    row -= 1
    return decodes + row, number - (tl.load(query_start + decodes + row) // _SIZE + row)


@triton.jit
def _chunk_start_and_length(number, decodes, seqs, query_start, contexts, seen, known, guessed, long):
    """The length reaches to the sequence's end. It is 0 if the sequence is not computed in chunks."""
    row, piece = _chunk_sequence_and_index(number, decodes, seqs, query_start)
    start, first, begin, stop, context = load_sequence_bounds(row, query_start, contexts, seen, known, guessed)
    count = tl.where(uses_chunked_kernel(first, begin, stop, context, long), context - first - piece * _SIZE, 0)
    return start + piece * _SIZE, count


@triton.jit
def _store_bfloat16_pair(to, x):
    at = tl.arange(0, _SIZE)
    where = at[:, None] * _SIZE + at[None, :]
    high, low = split_into_bfloat16_pair(x)
    tl.store(to + where, high)
    tl.store(to + _SIZE * _SIZE + where, low)


@triton.jit
def _multiply_by_key_blocks(
    of_row, inside, K_OFFSET: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """q k^T and k k^T [64, 64], and the squared lengths of q and k, in fewer registers than whole keys take. of_row:
    pointers to the first element of each token's q.
    """
    q_products, k_products = tl.zeros((_SIZE, _SIZE), tl.float32), tl.zeros((_SIZE, _SIZE), tl.float32)
    q_squares, k_squares = tl.zeros((_SIZE,), tl.float32), tl.zeros((_SIZE,), tl.float32)
    for begin in tl.range(0, KEY_PAD, KEY_BLOCK, num_stages=2):
        k_at = begin + tl.arange(0, KEY_BLOCK)
        mask = inside[:, None] & (k_at < KEY)[None, :]
        of_q = of_row[:, None] + k_at[None, :]
        q, k = tl.load(of_q, mask=mask, other=0.0), tl.load(of_q + K_OFFSET, mask=mask, other=0.0)
        q_wide, k_wide = q.to(tl.float32), k.to(tl.float32)
        q_squares += tl.sum(q_wide * q_wide, 1)
        k_squares += tl.sum(k_wide * k_wide, 1)
        q_products = tl.dot(q, tl.trans(k), q_products)
        k_products = tl.dot(k, tl.trans(k), k_products)
    return q_products, k_products, q_squares, k_squares


@triton.jit(do_not_specialize=["guessed", "long", "decodes", "seqs"], do_not_specialize_on_alignment=SEQUENCE_POINTERS)
def prepare_delta_chunks(
    systems, tiles, factors, given, beside, rate, shift,
    query_start, contexts, seen, known, guessed, long, decodes, seqs,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr, VALUE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the terms without S. systems [chunks, HEADS, 64, 64] get A below the diagonal, beta on it. The last two
    tiles of [chunks, HEADS, 4, 64, 64] bfloat16 get coefficients of d in readouts. factors [chunks, HEADS, 4, 64] get
    those of q S, of k S, of d in the next matrix, and of the matrix. KEY_BLOCK: elements of
    keys that are loaded at a time.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    start, count = _chunk_start_and_length(number, decodes, seqs, query_start, contexts, seen, known, guessed, long)
    at, k_at = tl.arange(0, _SIZE), tl.arange(0, KEY_PAD)
    if count > 0:
        inside, token = at < count, (start + at).to(tl.int64)
        WHOLE_KEYS: tl.constexpr = KEY_BLOCK == KEY_PAD
        if WHOLE_KEYS:
            mask = inside[:, None] & (k_at < KEY)[None, :]
            of_q = given + token[:, None] * (2 * KEY_HEADS * KEY + HEADS * VALUE) + k_at[None, :]
            of_q += (head // (HEADS // KEY_HEADS)) * KEY
            q, k = tl.load(of_q, mask=mask, other=0.0), tl.load(of_q + KEY_HEADS * KEY, mask=mask, other=0.0)
        else:
            of_row = given + token * (2 * KEY_HEADS * KEY + HEADS * VALUE) + (head // (HEADS // KEY_HEADS)) * KEY
            q_products, k_products, q_squares, k_squares = _multiply_by_key_blocks(
                of_row, inside, KEY_HEADS * KEY, KEY, KEY_PAD, KEY_BLOCK
            )
        b = tl.load(beside + token * (2 * HEADS) + head, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(beside + token * (2 * HEADS) + HEADS + head, mask=inside, other=0.0).to(tl.float32)
        beta = tl.where(inside, 1.0 / (1.0 + tl.exp(-b)), 0.0)
        decays = tl.where(inside, tl.load(rate + head) * softplus(a + tl.load(shift + head)), 0.0)
        sums = tl.cumsum(decays, 0)
        total = tl.sum(tl.where(at == _SIZE - 1, sums, 0.0), 0)  # a separate sum would round differently
        if WHOLE_KEYS:
            q_wide, k_wide = q.to(tl.float32), k.to(tl.float32)
        of_q = tl.rsqrt((tl.sum(q_wide * q_wide, 1) if WHOLE_KEYS else q_squares) + 1e-6) * KEY**-0.5
        of_k = tl.rsqrt((tl.sum(k_wide * k_wide, 1) if WHOLE_KEYS else k_squares) + 1e-6)
        past = at[:, None] > at[None, :]
        between = tl.exp(tl.where(past, sums[:, None] - sums[None, :], 0.0)) * of_k[None, :]
        to = factors + (number.to(tl.int64) * HEADS + head) * (4 * _SIZE) + at
        tl.store(to, tl.exp(sums) * of_q)
        tl.store(to + _SIZE, tl.exp(sums) * of_k)
        tl.store(to + 2 * _SIZE, tl.exp(total - sums) * of_k)
        tl.store(to + 3 * _SIZE, tl.exp(total + tl.zeros_like(sums)))
        to = tiles + (number.to(tl.int64) * HEADS + head) * (4 * _SIZE * _SIZE)
        reads = (tl.dot(q, tl.trans(k)) if WHOLE_KEYS else q_products) * between * of_q[:, None]
        _store_bfloat16_pair(to + 2 * _SIZE * _SIZE, tl.where(at[:, None] >= at[None, :], reads, 0.0))
        keys = (tl.dot(k, tl.trans(k)) if WHOLE_KEYS else k_products) * between * (beta * of_k)[:, None]
        to = systems + (number.to(tl.int64) * HEADS + head) * (_SIZE * _SIZE) + at[:, None] * _SIZE + at[None, :]
        tl.store(to, tl.where(past, keys, beta[None, :]), mask=at[:, None] >= at[None, :])


@triton.jit
def _load_16x16_block(system, row: tl.constexpr, column: tl.constexpr):
    i = tl.arange(0, 16)
    return tl.load(system + (row * 16 + i)[:, None] * _SIZE + column * 16 + i[None, :])


@triton.jit
def _dot_float32(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _store_beta_scaled_block(to, system, row: tl.constexpr, column: tl.constexpr, x):
    i = tl.arange(0, 16)
    where = (row * 16 + i)[:, None] * _SIZE + column * 16 + i[None, :]
    high, low = split_into_bfloat16_pair(x * tl.load(system + (column * 16 + i) * (_SIZE + 1))[None, :])
    tl.store(to + where, high)
    tl.store(to + _SIZE * _SIZE + where, low)


@triton.jit(do_not_specialize=["guessed", "long", "decodes", "seqs"], do_not_specialize_on_alignment=SEQUENCE_POINTERS)
def invert_delta_systems(
    tiles, systems, query_start, contexts, seen, known, guessed, long, decodes, seqs, HEADS: tl.constexpr,
):  # fmt: skip
    """Write (1 + A)^-1 beta to the first two of a chunk's tiles. One warp solves the four diagonal blocks of 16 rows at
    once, row by row, then the blocks below by products.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    _, count = _chunk_start_and_length(number, decodes, seqs, query_start, contexts, seen, known, guessed, long)
    if count > 0:
        i, n = tl.arange(0, 16), tl.arange(0, 4)
        system = systems + (number.to(tl.int64) * HEADS + head) * (_SIZE * _SIZE)
        to = tiles + (number.to(tl.int64) * HEADS + head) * (4 * _SIZE * _SIZE)
        one = ((i[:, None] == i[None, :])[None, :, :] & (n >= 0)[:, None, None]).to(tl.float32)
        solved = one
        for at in tl.static_range(1, 16):
            of_row = system + (n[:, None] * 16 + at) * _SIZE + n[:, None] * 16 + i[None, :]
            factors = tl.load(of_row, mask=(i < at)[None, :] & (n >= 0)[:, None], other=0.0)
            row_sums = tl.sum(factors[:, :, None] * solved, 1)
            solved = tl.where((i == at)[None, :, None], one - row_sums[:, None, :], solved)
        d0 = tl.sum(tl.where((n == 0)[:, None, None], solved, 0.0), 0)
        d1 = tl.sum(tl.where((n == 1)[:, None, None], solved, 0.0), 0)
        d2 = tl.sum(tl.where((n == 2)[:, None, None], solved, 0.0), 0)
        d3 = tl.sum(tl.where((n == 3)[:, None, None], solved, 0.0), 0)
        below = _dot_float32(-d1, _dot_float32(_load_16x16_block(system, 1, 0), d0))
        two = _dot_float32(_load_16x16_block(system, 2, 0), d0) + _dot_float32(_load_16x16_block(system, 2, 1), below)
        three = _dot_float32(_load_16x16_block(system, 3, 0), d0) + _dot_float32(_load_16x16_block(system, 3, 1), below)
        _store_beta_scaled_block(to, system, 0, 0, d0)
        _store_beta_scaled_block(to, system, 1, 0, below)
        below = _dot_float32(-d2, two)
        _store_beta_scaled_block(to, system, 2, 0, below)
        _store_beta_scaled_block(
            to, system, 3, 0, _dot_float32(-d3, three + _dot_float32(_load_16x16_block(system, 3, 2), below))
        )
        below = _dot_float32(-d2, _dot_float32(_load_16x16_block(system, 2, 1), d1))
        three = _dot_float32(_load_16x16_block(system, 3, 1), d1) + _dot_float32(_load_16x16_block(system, 3, 2), below)
        _store_beta_scaled_block(to, system, 1, 1, d1)
        _store_beta_scaled_block(to, system, 2, 1, below)
        _store_beta_scaled_block(to, system, 3, 1, _dot_float32(-d3, three))
        _store_beta_scaled_block(to, system, 2, 2, d2)
        _store_beta_scaled_block(to, system, 3, 2, _dot_float32(-d3, _dot_float32(_load_16x16_block(system, 3, 2), d2)))
        _store_beta_scaled_block(to, system, 3, 3, d3)
        nothing = tl.zeros_like(d0)
        _store_beta_scaled_block(to, system, 0, 1, nothing)
        _store_beta_scaled_block(to, system, 0, 2, nothing)
        _store_beta_scaled_block(to, system, 0, 3, nothing)
        _store_beta_scaled_block(to, system, 1, 2, nothing)
        _store_beta_scaled_block(to, system, 1, 3, nothing)
        _store_beta_scaled_block(to, system, 2, 3, nothing)


@triton.jit(do_not_specialize=["guessed", "long", "decodes", "seqs"], do_not_specialize_on_alignment=SEQUENCE_POINTERS)
def prepare_state_space_chunks(
    tiles, factors, given, beside, rate, shift,
    query_start, contexts, seen, known, guessed, long, decodes, seqs, least, most,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Compute the terms without S. tiles [chunks, HEADS, 2, 64, 64] get coefficients of x in readouts. factors [chunks,
    HEADS, 4, 64] get those of c S, nothing, those of x in the next matrix, and of the matrix.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    start, count = _chunk_start_and_length(number, decodes, seqs, query_start, contexts, seen, known, guessed, long)
    at, k_at = tl.arange(0, _SIZE), tl.arange(0, KEY_PAD)
    if count > 0:
        inside, token = at < count, (start + at).to(tl.int64)
        mask = inside[:, None] & (k_at < KEY)[None, :]
        of_b = given + token[:, None] * (HEADS * VALUE + 2 * GROUPS * KEY) + k_at[None, :]
        of_b += HEADS * VALUE + (head // (HEADS // GROUPS)) * KEY
        b, c = tl.load(of_b, mask=mask, other=0.0), tl.load(of_b + GROUPS * KEY, mask=mask, other=0.0)
        dt = tl.load(beside + token * HEADS + head, mask=inside, other=0.0).to(tl.float32)
        step = tl.minimum(tl.maximum(softplus(dt + tl.load(shift + head)), least), most)
        step = tl.where(inside, step, 0.0)
        decays = tl.load(rate + head) * step
        sums = tl.cumsum(decays, 0)
        total = tl.sum(tl.where(at == _SIZE - 1, sums, 0.0), 0)  # a separate sum would round differently
        past = at[:, None] >= at[None, :]
        between = tl.exp(tl.where(past, sums[:, None] - sums[None, :], 0.0)) * step[None, :]
        to = tiles + (number.to(tl.int64) * HEADS + head) * (2 * _SIZE * _SIZE)
        _store_bfloat16_pair(to, tl.where(past, tl.dot(c, tl.trans(b)) * between, 0.0))
        to = factors + (number.to(tl.int64) * HEADS + head) * (4 * _SIZE) + at
        tl.store(to, tl.exp(sums))
        tl.store(to + 2 * _SIZE, tl.exp(total - sums) * step)
        tl.store(to + 3 * _SIZE, tl.exp(total + tl.zeros_like(sums)))


@triton.jit(do_not_specialize=["guessed", "long", "decodes"], do_not_specialize_on_alignment=SEQUENCE_POINTERS)
def advance_chunks(
    read, matrices, tiles, factors, given, skip, query_start, contexts, seen, known, slots, guessed, long, decodes,
    DELTA: tl.constexpr, INPUTS: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr,
    SHARING: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr, VALUE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A token's [INPUTS] have q (or c) per SHARING heads from Q_AT on, k (or b) from K_AT on, and v (or x) per head
    from V_AT on.
    """
    row, head = decodes + tl.program_id(0), tl.program_id(1)
    at, k_at = tl.arange(0, _SIZE), tl.arange(0, KEY_PAD)
    v_at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    start, first, begin, stop, context = load_sequence_bounds(row, query_start, contexts, seen, known, guessed)
    if uses_chunked_kernel(first, begin, stop, context, long):
        slot = tl.load(slots + row)
        own = matrices + (slot * HEADS + head) * (KEY * VALUE) + k_at[:, None] * VALUE + v_at[None, :]
        whole = (k_at < KEY)[:, None] & (v_at < VALUE)[None, :]
        state = tl.load(own, mask=whole & (first != 0), other=0.0)
        TILES: tl.constexpr = 4 if DELTA else 2
        where = at[:, None] * _SIZE + at[None, :]
        if not DELTA:
            head_skip = tl.load(skip + head)
        for done in tl.range(0, context - first, _SIZE, num_stages=STAGES):
            inside = done + at < context - first
            token = (start + done + at).to(tl.int64)
            numbers = given + token[:, None] * INPUTS
            of_key = numbers + (head // SHARING) * KEY + k_at[None, :]
            mask = inside[:, None] & (k_at < KEY)[None, :]
            q, k = tl.load(of_key + Q_AT, mask=mask, other=0.0), tl.load(of_key + K_AT, mask=mask, other=0.0)
            of_value = inside[:, None] & (v_at < VALUE)[None, :]
            v = tl.load(numbers + V_AT + head * VALUE + v_at[None, :], mask=of_value, other=0.0)
            piece = (start // _SIZE + row - decodes + done // _SIZE).to(tl.int64) * HEADS + head
            tile, factor = tiles + piece * (TILES * _SIZE * _SIZE) + where, factors + piece * (4 * _SIZE)
            high, low = split_into_bfloat16_pair(state)
            readout = tl.dot(q, high, tl.dot(q, low)) * tl.load(factor + at)[:, None]
            if DELTA:
                solve, solve_low = tl.load(tile), tl.load(tile + _SIZE * _SIZE)
                wanted = v.to(tl.float32) - tl.dot(k, high, tl.dot(k, low)) * tl.load(factor + _SIZE + at)[:, None]
                wanted, wanted_low = split_into_bfloat16_pair(wanted)
                d_wide = tl.dot(solve, wanted, tl.dot(solve, wanted_low, tl.dot(solve_low, wanted)))
                d, d_low = split_into_bfloat16_pair(d_wide)
                weights, weights_low = tl.load(tile + 2 * _SIZE * _SIZE), tl.load(tile + 3 * _SIZE * _SIZE)
                readout = tl.dot(weights, d, tl.dot(weights, d_low, tl.dot(weights_low, d, readout)))
            else:
                d_wide = v.to(tl.float32)
                readout = tl.dot(tl.load(tile), v, tl.dot(tl.load(tile + _SIZE * _SIZE), v, readout))
                readout = tl.fma(d_wide, head_skip, readout)
            to = read + (token[:, None] * HEADS + head) * VALUE + v_at[None, :]
            tl.store(to, readout, mask=of_value)
            added, added_low = split_into_bfloat16_pair(d_wide * tl.load(factor + 2 * _SIZE + at)[:, None])
            state = state * tl.load(factor + 3 * _SIZE)
            k = tl.trans(k)
            state = tl.dot(k, added, tl.dot(k, added_low, state))
        tl.store(own, state, mask=whole)
