"""A sum over ranks in one kernel: each rank lays its numbers into memory of its own that all others can read, tells
them, waits until all have told, and adds what lies there, in float32 and in the order of the ranks.

Each program has a part of the numbers, and a place in that memory, to itself: it waits for the same program of the
other ranks and for no other. Its sums are counted, and a rank tells another by writing the count into that one's
memory. Places alternate between two: a rank writes to one again when all ranks have told of the sum after, which they
begin when they have read the one before. The count is in memory, not an argument, so a CUDA graph can hold the kernel.

What a rank stored is seen by those that it has told: it tells by a release at the system's scope behind a barrier of
the program's threads, the others look by acquires, and have such a barrier before they read.

Nothing waits for ever: a program looks now and then at a word of the host's memory that says to stop, and counts how
often it has looked. Then it says that it gave up, and no later program of its rank tells anybody anything, so that no
other rank adds what was made of numbers that are none.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOOKS = tl.constexpr(256)
"""At the count between two looks at the host's memory, which is far."""


@triton.jit
def _rank_buffer_pointer(addresses, rank, place, dtype: tl.constexpr):
    """Where a rank's memory has numbers: in lines, so that they are read and written many at a time."""
    return tl.multiple_of((tl.load(addresses + rank) + place).to(tl.pointer_type(dtype)), 128)


@triton.jit(do_not_specialize=["most_looks"])
def sum_over_ranks(
    out, x, addresses, counts, words, size, most_looks,
    RANK: tl.constexpr, RANKS: tl.constexpr, RANKS_PADDED: tl.constexpr, PROGRAMS: tl.constexpr, PART: tl.constexpr,
    HEAD: tl.constexpr,
):  # fmt: skip
    """out [size] of the ranks' x [size]. addresses [RANKS] int64: of each rank's memory, which begins with HEAD bytes
    of counts [PROGRAMS, RANKS] int64, what each rank has told; two places of PART times 4 bytes for each program
    follow. counts [PROGRAMS + 1] int64: sums of each program, and whether one gave up. words [2] int32, the host's: to
    stop, and that one gave up. Grid: programs of PART numbers."""
    program, i = tl.program_id(0), tl.arange(0, PART)
    if tl.load(counts + PROGRAMS) == 0:
        at = program * PART + i
        inside = at < size
        count = tl.load(counts + program)
        place = HEAD + ((count % 2) * PROGRAMS + program) * (PART * 4)
        own = _rank_buffer_pointer(addresses, RANK, place, x.dtype.element_ty)
        tl.store(own + i, tl.load(x + at, mask=inside, other=0.0), mask=inside)
        tl.debug_barrier()  # all threads have stored before one of them tells
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
