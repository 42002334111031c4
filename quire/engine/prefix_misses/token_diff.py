"""Compares two token sequences after their first difference: finds text that was moved, or that now follows other text.
A sequence is bytes, four for each token (`array("i")`)."""

from __future__ import annotations

from typing import NamedTuple

TOKEN_BYTES = 4
"""Bytes of a token."""
MIN_RUN_TOKENS = 16
"""The shortest run of equal tokens that counts as the same text. What templates put around turns is shorter."""


class EqualRun(NamedTuple):
    """A run of equal tokens: `length` tokens, at `old_start` in the earlier sequence and at `new_start` in the later
    one."""

    old_start: int
    new_start: int
    length: int


def common_prefix_length(first: bytes, second: bytes) -> int:
    """The number of tokens with which both sequences start."""
    low, high = 0, min(len(first), len(second)) // TOKEN_BYTES
    if first[: high * TOKEN_BYTES] == second[: high * TOKEN_BYTES]:
        return high
    while high - low > 1:  # the sequences are equal up to `low` and differ before `high`
        middle = (low + high) // 2
        if first[low * TOKEN_BYTES : middle * TOKEN_BYTES] == second[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low


def find_equal_runs(old: bytes, new: bytes) -> list[EqualRun]:
    """The pieces of `new` that also occur in `old`, in the order of `new`, without overlaps. It finds all pieces of at
    least LEAST tokens, except where `old` repeats itself."""
    size = (
        MIN_RUN_TOKENS // 2 * TOKEN_BYTES
    )  # any run of LEAST tokens contains one such block at a multiple of its size
    positions: dict[bytes, int] = {}
    for start in range(0, len(old) - size + 1, size):
        positions.setdefault(old[start : start + size], start)
    runs: list[EqualRun] = []
    at = floor = 0
    while at + size <= len(new):
        old_position = positions.get(new[at : at + size])
        if old_position is None:
            at += TOKEN_BYTES
            continue
        num_back = 0
        while num_back < min(old_position, at - floor) and old[old_position - num_back - 1] == new[at - num_back - 1]:
            num_back += 1
        num_back -= num_back % TOKEN_BYTES
        end = at + _count_equal_bytes(old, old_position, new, at)
        if end - at + num_back < MIN_RUN_TOKENS * TOKEN_BYTES:
            at += TOKEN_BYTES
            continue
        runs.append(
            EqualRun(
                (old_position - num_back) // TOKEN_BYTES,
                (at - num_back) // TOKEN_BYTES,
                (end - at + num_back) // TOKEN_BYTES,
            )
        )
        at = floor = end
    return runs


def _count_equal_bytes(first: bytes, first_start: int, second: bytes, second_start: int) -> int:
    """The number of equal bytes from these places on, in whole tokens."""
    count, size = 0, 64 * TOKEN_BYTES
    while (
        first[first_start + count : first_start + count + size]
        == second[second_start + count : second_start + count + size]
    ):
        if min(len(first) - first_start, len(second) - second_start) <= count + size:
            return min(len(first) - first_start, len(second) - second_start)
        count, size = count + size, 2 * size
    rest = common_prefix_length(
        first[first_start + count : first_start + count + size],
        second[second_start + count : second_start + count + size],
    )
    return count + rest * TOKEN_BYTES
