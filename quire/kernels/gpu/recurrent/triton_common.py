"""Common code of advance_delta, advance_scan and advance_space. These compute read [T, HEADS, VALUE] and matrices token
by token. A program has some columns of one head's matrix of a sequence. One warp has whole columns, so it can sum over
them. One loop body serves decodes, prompts and drafts, so a token's bits depend only on the matrix before the token and
on its inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

SEQUENCE_POINTERS = ["query_start", "contexts", "seen", "known", "slots"]
"""Pointers that may be unaligned."""


@triton.jit
def load_sequence_bounds(row, query_start, contexts, seen, known, guessed):
    """Return the index in the step of a sequence's first token, then positions: of that token, of the first token not
    in the matrix, of the first draft token, and of the end.
    """
    start = tl.load(query_start + row)
    context = tl.load(contexts + row)
    first = context - (tl.load(query_start + row + 1) - start)
    begin, stop = first, context
    if guessed:
        begin = tl.load(seen + row)
        stop = tl.minimum(tl.maximum(tl.load(known + row), begin), context)
    return start, first, begin, stop, context


@triton.jit
def uses_chunked_kernel(first, begin, stop, context, long):
    """True for sequences of at least `long` tokens (0: never) without draft tokens in this step and accepted ones from
    the last.
    """
    return (long > 0) & (begin == first) & (stop == context) & (context - first >= long)


@triton.jit
def token_input_pointers(
    given, beside, guesses, slot, position, first, start,
    INPUTS: tl.constexpr, BESIDE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """A position's inputs are in the step or, before `first`, among the slot's draft inputs."""
    token = (start + position - first).to(tl.int64)
    numbers, others = given + token * INPUTS, beside + token * BESIDE
    if MOST:
        draft = guesses + (slot * MOST + position % MOST) * (INPUTS + BESIDE)
        numbers, others = tl.where(position < first, draft, numbers), tl.where(position < first, draft + INPUTS, others)
    return numbers, others


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), or x above 20, as PyTorch does. Exact for small exp(x), because the factor cancels the
    rounding of 1 + exp(x).
    """
    power = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + power
    some = tl.log(whole) * (power / tl.where(whole == 1.0, 1.0, whole - 1.0))
    return tl.where(x > 20.0, x, tl.where(whole == 1.0, power, some))


@triton.jit(do_not_specialize_on_alignment=SEQUENCE_POINTERS)
def store_draft_inputs(
    guesses, given, beside, query_start, contexts, seen, known, slots,
    INPUTS: tl.constexpr, BESIDE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Runs after all programs have read the draft inputs of the previous step."""
    row = tl.program_id(0)
    start, first, _, stop, context = load_sequence_bounds(row, query_start, contexts, seen, known, True)
    position = tl.maximum(stop, first) + tl.program_id(1)
    if position < context:
        token = (start + position - first).to(tl.int64)
        to = guesses + (tl.load(slots + row) * MOST + position % MOST) * (INPUTS + BESIDE)
        for begin in range(0, INPUTS, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            tl.store(to + i, tl.load(given + token * INPUTS + i, mask=i < INPUTS), mask=i < INPUTS)
        for begin in range(0, BESIDE, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            tl.store(to + INPUTS + i, tl.load(beside + token * BESIDE + i, mask=i < BESIDE), mask=i < BESIDE)


@triton.jit(do_not_specialize=["total"])
def norm_and_gate(
    out, read, z, norm, total, eps, SIZE: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
    NORMED: tl.constexpr, FIRST: tl.constexpr, ROUND: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """NORMED: apply RMSNorm to pieces of SIZE elements with norm [PIECES, SIZE], before the gate if FIRST. ROUND: round
    y to z's dtype before the norm. SIGMOID: gates are sigmoids of z, not SiLU.
    """
    piece, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = piece * SIZE + i
    inside = (i < SIZE) & (at < total)
    y = tl.load(read + at, mask=inside, other=0.0)
    z_raw = tl.load(z + at, mask=inside, other=0.0)
    z_wide = z_raw.to(tl.float32)
    gate = (1.0 if SIGMOID else z_wide) / (1.0 + tl.exp(-z_wide))
    if NORMED:
        if not FIRST:
            y = y * gate
        if ROUND:
            y = y.to(z_raw.dtype).to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y, 0) / SIZE + eps)
        y = y * tl.load(norm + piece % PIECES * SIZE + i, mask=i < SIZE, other=0.0)
        if FIRST:
            y = y * gate
    else:
        y = y * gate
    tl.store(out + at, y.to(z_raw.dtype), mask=inside)
