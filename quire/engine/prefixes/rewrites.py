"""Compares two token sequences after their first difference: finds text that was moved, or that now follows other text.
A sequence is bytes, four for each token (`array("i")`)."""

from __future__ import annotations

from typing import NamedTuple

WIDTH = 4
"""Bytes of a token."""
LEAST = 16
"""The shortest run of equal tokens that counts as the same text. What templates put around turns is shorter."""


class Piece(NamedTuple):
    """A run of equal tokens: `length` tokens, at `old` in the earlier sequence and at `new` in the later one."""

    old: int
    new: int
    length: int


def common_prefix(one: bytes, other: bytes) -> int:
    """The number of tokens with which both sequences start."""
    low, high = 0, min(len(one), len(other)) // WIDTH
    if one[: high * WIDTH] == other[: high * WIDTH]:
        return high
    while high - low > 1:  # the sequences are equal up to `low` and differ before `high`
        middle = (low + high) // 2
        if one[low * WIDTH : middle * WIDTH] == other[low * WIDTH : middle * WIDTH]:
            low = middle
        else:
            high = middle
    return low


def equal_pieces(old: bytes, new: bytes) -> list[Piece]:
    """The pieces of `new` that also occur in `old`, in the order of `new`, without overlaps. It finds all pieces of at
    least LEAST tokens, except where `old` repeats itself."""
    size = LEAST // 2 * WIDTH  # any run of LEAST tokens contains one such block at a multiple of its size
    places: dict[bytes, int] = {}
    for start in range(0, len(old) - size + 1, size):
        places.setdefault(old[start : start + size], start)
    found: list[Piece] = []
    at = floor = 0
    while at + size <= len(new):
        place = places.get(new[at : at + size])
        if place is None:
            at += WIDTH
            continue
        back = 0
        while back < min(place, at - floor) and old[place - back - 1] == new[at - back - 1]:
            back += 1
        back -= back % WIDTH
        end = at + _equal(old, place, new, at)
        if end - at + back < LEAST * WIDTH:
            at += WIDTH
            continue
        found.append(Piece((place - back) // WIDTH, (at - back) // WIDTH, (end - at + back) // WIDTH))
        at = floor = end
    return found


def _equal(one: bytes, at: int, other: bytes, place: int) -> int:
    """The number of equal bytes from these places on, in whole tokens."""
    count, size = 0, 64 * WIDTH
    while one[at + count : at + count + size] == other[place + count : place + count + size]:
        if min(len(one) - at, len(other) - place) <= count + size:
            return min(len(one) - at, len(other) - place)
        count, size = count + size, 2 * size
    rest = common_prefix(one[at + count : at + count + size], other[place + count : place + count + size])
    return count + rest * WIDTH
