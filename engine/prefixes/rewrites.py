"""What two token sequences have in common behind the first token in which they differ: text that was moved, or stands
behind other text now. All sequences are bytes, four a token (`array("i")`)."""

from __future__ import annotations

from typing import NamedTuple

WIDTH = 4
"""Bytes of a token."""
LEAST = 16
"""Tokens that a piece of text must have in a row to count as the same: what templates put around turns is shorter."""


class Piece(NamedTuple):
    """Equal tokens: `length` of them from `old` on in the one sequence, from `new` on in the other."""

    old: int
    new: int
    length: int


def common_prefix(one: bytes, other: bytes) -> int:
    """Tokens that both begin with."""
    low, high = 0, min(len(one), len(other)) // WIDTH
    if one[: high * WIDTH] == other[: high * WIDTH]:
        return high
    while high - low > 1:  # they are equal up to `low`, and differ before `high`
        middle = (low + high) // 2
        if one[low * WIDTH : middle * WIDTH] == other[low * WIDTH : middle * WIDTH]:
            low = middle
        else:
            high = middle
    return low


def equal_pieces(old: bytes, new: bytes) -> list[Piece]:
    """Pieces of `new` that stand somewhere in `old`, in the order of `new`, none within another; all that have LEAST
    tokens, but where `old` repeats itself."""
    size = LEAST // 2 * WIDTH  # of LEAST tokens wherever they begin, so many lie at a multiple of it
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
    """Bytes of whole tokens that are equal from these places on."""
    count, size = 0, 64 * WIDTH
    while one[at + count : at + count + size] == other[place + count : place + count + size]:
        if min(len(one) - at, len(other) - place) <= count + size:
            return min(len(one) - at, len(other) - place)
        count, size = count + size, 2 * size
    rest = common_prefix(one[at + count : at + count + size], other[place + count : place + count + size])
    return count + rest * WIDTH
