"""Finds moved text in token sequences. A sequence is bytes, four per token (`array("i")`)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from quire.engine.common.types import MediaSpan

TOKEN_BYTES = 4
MIN_RUN_TOKENS = 16
"""Shorter equal runs do not count, because templates write the same short texts around every turn."""


class EqualRun(NamedTuple):
    """Offsets and length in tokens."""

    old_start: int
    new_start: int
    length: int


def encode_prompt_tokens(prompt_ids: Sequence[int], spans: Sequence[MediaSpan]) -> bytes:
    """Image tokens become negative numbers derived from the image's content."""
    token_ids = array("i", prompt_ids)
    for span in spans:
        placeholder = -1 - int.from_bytes(span.digest[:4], "little") % 2**31
        token_ids[span.start : span.start + span.count] = array("i", [max(placeholder, -(2**31))] * span.count)
    return token_ids.tobytes()


def common_prefix_length(first: bytes, second: bytes) -> int:
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
    """Returns runs in the order of `new`, without overlaps. All runs of at least MIN_RUN_TOKENS are found, unless `old`
    repeats itself.
    """
    size = MIN_RUN_TOKENS // 2 * TOKEN_BYTES  # any long enough run contains an aligned block of this size
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
