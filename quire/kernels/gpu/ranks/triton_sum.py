"""Sum over ranks in one kernel. Each rank writes its numbers to its own memory, which all ranks can read, signals the
others, waits for their signals, and adds all numbers in float32 and rank order.

A program waits only for the same program on other ranks. Its signal is a count of sums. Two buffers alternate: a rank
reuses one once all ranks have signaled the next sum, which they start only after reading this one. A system-scope
release after a barrier makes stores visible, and readers poll with acquires.

No wait is endless: polls are counted, and programs also poll a stop flag in host memory. After a program gives up, its
rank never signals again, so no rank adds invalid numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOOKS = tl.constexpr(256)
"""Polls of counts for each poll of the stop flag, which is in slow host memory."""


@triton.jit
def _rank_buffer_pointer(addresses, rank, place, dtype: tl.constexpr):
    """Return an aligned pointer, for vector loads and stores."""
    return tl.multiple_of((tl.load(addresses + rank) + place).to(tl.pointer_type(dtype)), 128)


@triton.jit(do_not_specialize=["most_looks"])
def sum_over_ranks(
    out, x, addresses, counts, words, size, most_looks,
    RANK: tl.constexpr, RANKS: tl.constexpr, RANKS_PADDED: tl.constexpr, PROGRAMS: tl.constexpr, PART: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """addresses [RANKS] int64: each rank's memory. It has HEAD bytes of counts [PROGRAMS, RANKS] int64, which the ranks
    write, then two buffers of PART * 4 bytes per program. counts [PROGRAMS + 1] int64: sums of each program, then
    whether one gave up. words [2] int32 in host memory: stop flag, given-up flag.
    """
    program, i = tl.program_id(0), tl.arange(0, PART)
    if tl.load(counts + PROGRAMS) == 0:
        at = program * PART + i
        inside = at < size
        count = tl.load(counts + program)
        place = HEAD + ((count % 2) * PROGRAMS + program) * (PART * 4)
        own = _rank_buffer_pointer(addresses, RANK, place, x.dtype.element_ty)
        tl.store(own + i, tl.load(x + at, mask=inside, other=0.0), mask=inside)
        tl.debug_barrier()  # all threads must have stored before one signals
        rank = tl.arange(0, RANKS_PADDED)
        there = rank < RANKS
        theirs = tl.load(addresses + rank, mask=there, other=0).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(theirs + program * RANKS + RANK, count + 1, mask=there, sem="release", scope="sys")
        own_counts = tl.load(addresses + RANK).to(tl.pointer_type(tl.int64)) + program * RANKS + rank
        least = count
        looks = 0
        stopped = 0
        while (least <= count) & (stopped == 0):
            seen = tl.atomic_add(
                own_counts, tl.zeros((RANKS_PADDED,), tl.int64), mask=there, sem="acquire", scope="sys"
            )
            least = tl.min(tl.where(there, seen, count + 1), 0)
            looks += 1
            if looks % _LOOKS == 0:
                stopped = tl.load(words, volatile=True)
            if (looks >= most_looks) & (least <= count):
                stopped = 1
        tl.debug_barrier()
        if stopped == 0:
            first = _rank_buffer_pointer(addresses, 0, place, x.dtype.element_ty)
            total = tl.load(first + i, mask=inside, other=0.0).to(tl.float32)
            for other in tl.static_range(1, RANKS):
                part = _rank_buffer_pointer(addresses, other, place, x.dtype.element_ty)
                total += tl.load(part + i, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
            tl.store(counts + program, count + 1)
        else:
            tl.store(counts + PROGRAMS, 1)
            tl.store(words + 1, 1)
