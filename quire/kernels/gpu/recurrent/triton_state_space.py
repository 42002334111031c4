"""The state space of kernels/recurrent/state_space.py in Triton."""

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
def _load_space_token(
    numbers, others, wanted, head, k_at, v_at,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Return a head's x [BLOCK], its group's b and c [KEY_PAD], and the head's dt, all 0 unless `wanted`."""
    x = tl.load(numbers + head * VALUE + v_at, mask=wanted & (v_at < VALUE), other=0.0)
    of_group = numbers + HEADS * VALUE + (head // (HEADS // GROUPS)) * KEY + k_at
    b = tl.load(of_group, mask=wanted & (k_at < KEY), other=0.0)
    c = tl.load(of_group + GROUPS * KEY, mask=wanted & (k_at < KEY), other=0.0)
    return x, b, c, tl.load(others + head, mask=wanted, other=0.0)


@triton.jit(do_not_specialize=["guessed", "long"], do_not_specialize_on_alignment=SEQUENCE_POINTERS)
def advance_space(
    read, matrices, given, beside, guesses, rate, shift, skip, query_start, contexts, seen, known, slots, guessed, long,
    least, most,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr, VALUE: tl.constexpr,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    k_at, v_at = tl.arange(0, KEY_PAD), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    start, first, begin, stop, context = load_sequence_bounds(row, query_start, contexts, seen, known, guessed)
    context = tl.where(uses_chunked_kernel(first, begin, stop, context, long), begin, context)
    slot = tl.load(slots + row)
    own = matrices + (slot * HEADS + head) * (KEY * VALUE) + k_at[:, None] * VALUE + v_at[None, :]
    inside = (k_at < KEY)[:, None] & (v_at < VALUE)[None, :]
    state = tl.load(own, mask=inside & (first != 0), other=0.0)
    head_rate, head_shift, head_skip = tl.load(rate + head), tl.load(shift + head), tl.load(skip + head)
    INPUTS: tl.constexpr = HEADS * VALUE + 2 * GROUPS * KEY
    numbers, others = token_input_pointers(given, beside, guesses, slot, begin, first, start, INPUTS, HEADS, MOST)
    x_raw, b_raw, c_raw, dt = _load_space_token(
        numbers, others, begin < context, head, k_at, v_at, GROUPS, HEADS, KEY, VALUE
    )  # fmt: skip
    for position in range(begin, context):
        x, b, c = x_raw.to(tl.float32), b_raw.to(tl.float32), c_raw.to(tl.float32)
        step = tl.minimum(tl.maximum(softplus(dt.to(tl.float32) + head_shift), least), most)
        numbers, others = token_input_pointers(
            given, beside, guesses, slot, position + 1, first, start, INPUTS, HEADS, MOST
        )
        x_raw, b_raw, c_raw, dt = _load_space_token(
            numbers, others, position + 1 < context, head, k_at, v_at, GROUPS, HEADS, KEY, VALUE
        )  # fmt: skip
        state = tl.fma(b[:, None], (step * x)[None, :], state * tl.exp(head_rate * step))
        readout = tl.fma(x, head_skip, tl.sum(state * c[:, None], 0))
        to = read + ((start + position - first).to(tl.int64) * HEADS + head) * VALUE + v_at
        tl.store(to, readout, mask=(v_at < VALUE) & (position >= first))
        if position + 1 == stop:
            tl.store(own, state, mask=inside)
