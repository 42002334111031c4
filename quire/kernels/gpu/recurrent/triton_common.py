"""What the Triton kernels of all rules have in common: where a sequence's tokens begin and end, where what a token
gives lies, guesses that are kept, and what becomes of what tokens read.

A program has a part of the columns of one head's matrix of one sequence, and computes that sequence's tokens one after
the other: columns share nothing. It is one warp, so that sums over a column's numbers stay within it. There is one kind
of kernel for steps of one token, for prompts and for guesses, with one body of its loop: a token's bits depend on
nothing but the matrix before it and what it gives. Where they may depend on more, triton_chunks.py computes long
prompts.
"""

from __future__ import annotations

import triton
import triton.language as tl

SEQUENCE_POINTERS = ["query_start", "contexts", "seen", "known", "slots"]
"""Pointers to numbers of sequences, which lie anywhere."""


@triton.jit
def load_sequence_bounds(row, query_start, contexts, seen, known, guessed):
    """Of a step's sequence: the number of its first token in the step; positions: of that token, of the first that the
    matrix has not seen, of the first guess, and of the sequence's end. guessed: there are `seen` and `known`, as
    Guesses has them."""
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
    """Whether triton_chunks.py computes a sequence: one of `long` tokens or more, where that is not 0, of which none is
    a guess or was one."""
    return (long > 0) & (begin == first) & (stop == context) & (context - first >= long)


@triton.jit
def token_input_pointers(
    given, beside, guesses, slot, position, first, start,
    INPUTS: tl.constexpr, BESIDE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Where the numbers of a position lie, and those beside them: in the step, or before it among the guesses that the
    slot keeps."""
    token = (start + position - first).to(tl.int64)
    numbers, others = given + token * INPUTS, beside + token * BESIDE
    if MOST:
        draft = guesses + (slot * MOST + position % MOST) * (INPUTS + BESIDE)
        numbers, others = tl.where(position < first, draft, numbers), tl.where(position < first, draft + INPUTS, others)
    return numbers, others


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as PyTorch has it: x above 20. Exact where exp(x) is small: the rounding of 1 + exp(x) is taken
    back."""
    power = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + power
    some = tl.log(whole) * (power / tl.where(whole == 1.0, 1.0, whole - 1.0))
    return tl.where(x > 20.0, x, tl.where(whole == 1.0, power, some))


@triton.jit(do_not_specialize_on_alignment=SEQUENCE_POINTERS)
def store_draft_inputs(
    guesses, given, beside, query_start, contexts, seen, known, slots,
    INPUTS: tl.constexpr, BESIDE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the guesses of a step give, to their slots: after all programs have read those of the step before, which may
    lie in the same places. Grid: sequences, MOST."""
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
    NORMED: tl.constexpr, FIRST: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """out of what tokens read, both [total], and of their gates z. NORMED: pieces of SIZE numbers are normed
    (RMSNorm) by norm [PIECES, SIZE]; FIRST: before the gate. ROUND: they are rounded to the type of z before. Grid:
    pieces."""
    piece, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = piece * SIZE + i
    inside = (i < SIZE) & (at < total)
    y = tl.load(read + at, mask=inside, other=0.0)
    z_raw = tl.load(z + at, mask=inside, other=0.0)
    z_wide = z_raw.to(tl.float32)
    gate = z_wide / (1.0 + tl.exp(-z_wide))
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
