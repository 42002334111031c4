"""The delta rule of kernels/recurrent/delta_rule.py in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.recurrent.triton_common import (
    SEQUENCE_POINTERS,
    load_sequence_bounds,
    softplus,
    token_input_pointers,
    uses_chunked_kernel,
)


@triton.jit
def _load_delta_token(
    numbers, others, wanted, head, k_at, v_at,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROW_DECAY: tl.constexpr,
):  # fmt: skip
    """Return q and k [KEY_PAD], v [BLOCK], b and a of one head, all 0 unless `wanted`. If ROW_DECAY, a is [KEY_PAD]."""
    of_key = numbers + (head // (HEADS // KEY_HEADS)) * KEY + k_at
    q = tl.load(of_key, mask=wanted & (k_at < KEY), other=0.0)
    k = tl.load(of_key + KEY_HEADS * KEY, mask=wanted & (k_at < KEY), other=0.0)
    v = tl.load(numbers + 2 * KEY_HEADS * KEY + head * VALUE + v_at, mask=wanted & (v_at < VALUE), other=0.0)
    b = tl.load(others + head, mask=wanted, other=0.0)
    if ROW_DECAY:
        a = tl.load(others + HEADS + head * KEY + k_at, mask=wanted & (k_at < KEY), other=0.0)
    else:
        a = tl.load(others + HEADS + head, mask=wanted, other=0.0)
    return q, k, v, b, a


@triton.jit(do_not_specialize=["guessed", "long"], do_not_specialize_on_alignment=SEQUENCE_POINTERS)
def advance_delta(
    read, matrices, given, beside, guesses, rate, shift, query_start, contexts, seen, known, slots, guessed, long,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr, VALUE: tl.constexpr,
    MOST: tl.constexpr, BLOCK: tl.constexpr, ROW_DECAY: tl.constexpr,
):  # fmt: skip
    """Both sums over the matrix can be made at once, because a readout is the sum of q S before the token's update and
    (q k) times the token's delta.
    """
    row, head = tl.program_id(0), tl.program_id(1)
    k_at, v_at = tl.arange(0, KEY_PAD), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    start, first, begin, stop, context = load_sequence_bounds(row, query_start, contexts, seen, known, guessed)
    context = tl.where(uses_chunked_kernel(first, begin, stop, context, long), begin, context)
    slot = tl.load(slots + row)
    own = matrices + (slot * HEADS + head) * (KEY * VALUE) + k_at[:, None] * VALUE + v_at[None, :]
    inside = (k_at < KEY)[:, None] & (v_at < VALUE)[None, :]
    state = tl.load(own, mask=inside & (first != 0), other=0.0)
    head_rate = tl.load(rate + head)
    if ROW_DECAY:
        head_shift = tl.load(shift + head * KEY + k_at, mask=k_at < KEY, other=0.0)
    else:
        head_shift = tl.load(shift + head)
    BESIDE: tl.constexpr = HEADS * (1 + KEY) if ROW_DECAY else 2 * HEADS
    INPUTS: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    numbers, others = token_input_pointers(given, beside, guesses, slot, begin, first, start, INPUTS, BESIDE, MOST)
    q_raw, k_raw, v_raw, b, a = _load_delta_token(
        numbers, others, begin < context, head, k_at, v_at, KEY_HEADS, HEADS, KEY, VALUE, ROW_DECAY
    )  # fmt: skip
    for position in range(begin, context):
        q, k, v = q_raw.to(tl.float32), k_raw.to(tl.float32), v_raw.to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))
        decay = tl.exp(head_rate * softplus(a.to(tl.float32) + head_shift))
        numbers, others = token_input_pointers(
            given, beside, guesses, slot, position + 1, first, start, INPUTS, BESIDE, MOST
        )
        q_raw, k_raw, v_raw, b, a = _load_delta_token(
            numbers, others, position + 1 < context, head, k_at, v_at, KEY_HEADS, HEADS, KEY, VALUE, ROW_DECAY
        )  # fmt: skip
        q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * KEY**-0.5)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        state = state * (decay[:, None] if ROW_DECAY else decay)
        delta = beta * (v - tl.sum(state * k[:, None], 0))
        readout = tl.fma(delta, tl.sum(q * k, 0), tl.sum(state * q[:, None], 0))
        state = tl.fma(k[:, None], delta[None, :], state)
        to = read + ((start + position - first).to(tl.int64) * HEADS + head) * VALUE + v_at
        tl.store(to, readout, mask=(v_at < VALUE) & (position >= first))
        if position + 1 == stop:
            tl.store(own, state, mask=inside)
