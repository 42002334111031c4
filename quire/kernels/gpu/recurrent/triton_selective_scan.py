"""The selective scan of kernels/recurrent/selective_scan.py in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.recurrent.triton_common import (
    SEQUENCE_POINTERS,
    load_sequence_bounds,
    softplus,
    token_input_pointers,
)


@triton.jit
def _load_scan_token(
    numbers, others, wanted, k_at, channel, inside, KEY: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return x [BLOCK], b and c [KEY_PAD], and dt [BLOCK] for BLOCK channels, all 0 unless `wanted`."""
    x = tl.load(numbers + channel, mask=wanted & inside, other=0.0)
    b = tl.load(numbers + CHANNELS + k_at, mask=wanted & (k_at < KEY), other=0.0)
    c = tl.load(numbers + CHANNELS + KEY + k_at, mask=wanted & (k_at < KEY), other=0.0)
    return x, b, c, tl.load(others + channel, mask=wanted & inside, other=0.0)


@triton.jit
def _rms_norm(numbers, weight, eps, KEY: tl.constexpr):
    return numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / KEY + eps) * weight


@triton.jit(do_not_specialize=["guessed"], do_not_specialize_on_alignment=SEQUENCE_POINTERS)
def advance_scan(
    read, matrices, given, beside, guesses, rate, shift, skip, write_norm, read_norm,
    query_start, contexts, seen, known, slots, guessed, eps,
    HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr, VALUE: tl.constexpr, NORMED: tl.constexpr,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Inputs are loaded two tokens ahead."""
    row, head = tl.program_id(0), tl.program_id(1)
    k_at, v_at = tl.arange(0, KEY_PAD), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    start, first, begin, stop, context = load_sequence_bounds(row, query_start, contexts, seen, known, guessed)
    slot, v_inside, channel = tl.load(slots + row), v_at < VALUE, head * VALUE + v_at
    within = k_at[:, None] * VALUE + v_at[None, :]
    own, inside = matrices + (slot * HEADS + head) * (KEY * VALUE) + within, (k_at < KEY)[:, None] & v_inside[None, :]
    state = tl.load(own, mask=inside & (first != 0), other=0.0)
    rates = tl.load(rate + head * (KEY * VALUE) + within, mask=inside, other=0.0)
    shifts = tl.load(shift + channel, mask=v_inside, other=0.0)
    skips = tl.load(skip + channel, mask=v_inside, other=0.0)
    if NORMED:
        writes = tl.load(write_norm + k_at, mask=k_at < KEY, other=0.0)
        reads = tl.load(read_norm + k_at, mask=k_at < KEY, other=0.0)
    CHANNELS: tl.constexpr = HEADS * VALUE
    INPUTS: tl.constexpr = CHANNELS + 2 * KEY
    numbers, others = token_input_pointers(given, beside, guesses, slot, begin, first, start, INPUTS, CHANNELS, MOST)
    x_raw, b_raw, c_raw, dt = _load_scan_token(numbers, others, begin < context, k_at, channel, v_inside, KEY, CHANNELS)
    numbers, others = token_input_pointers(
        given, beside, guesses, slot, begin + 1, first, start, INPUTS, CHANNELS, MOST
    )
    x_next, b_next, c_next, dt_next = _load_scan_token(
        numbers, others, begin + 1 < context, k_at, channel, v_inside, KEY, CHANNELS
    )  # fmt: skip
    for position in range(begin, context):
        x, b, c = x_raw.to(tl.float32), b_raw.to(tl.float32), c_raw.to(tl.float32)
        step = softplus(dt.to(tl.float32) + shifts)
        x_raw, b_raw, c_raw, dt = x_next, b_next, c_next, dt_next
        numbers, others = token_input_pointers(
            given, beside, guesses, slot, position + 2, first, start, INPUTS, CHANNELS, MOST
        )
        x_next, b_next, c_next, dt_next = _load_scan_token(
            numbers, others, position + 2 < context, k_at, channel, v_inside, KEY, CHANNELS
        )  # fmt: skip
        if NORMED:
            b, c = _rms_norm(b, writes, eps, KEY), _rms_norm(c, reads, eps, KEY)
        state = tl.fma(b[:, None], (step * x)[None, :], state * tl.exp(rates * step[None, :]))
        readout = tl.fma(x, skips, tl.sum(state * c[:, None], 0))
        to = read + (start + position - first).to(tl.int64) * CHANNELS + channel
        tl.store(to, readout, mask=v_inside & (position >= first))
        if position + 1 == stop:
            tl.store(own, state, mask=inside)
