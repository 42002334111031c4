"""Fingerprints of prompts: how they are compared, and how many are stored."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.common.types import MediaSpan
from quire.server.cache_diagnostics import (
    BLOCK_TOKENS,
    CacheDiagnosis,
    PromptFingerprint,
    RecentPrompts,
    make_fingerprint,
)

TOKENS = list(range(100))
REUSABLE = 96
"""Tokens of full blocks in TOKENS."""


def fingerprint(tokens: list[int], messages: list[str], **parts: Any) -> PromptFingerprint:
    return make_fingerprint({"tools": [], "settings": 0, **parts}, messages, tokens, ()).with_model("m")


def test_diagnosis_names_first_changed_part_and_counts_blocks_after_common_prefix() -> None:
    earlier = fingerprint(TOKENS, ["a"])
    tools = fingerprint([*TOKENS[:40], -1, *TOKENS[41:], 7], ["b"], tools=[1])
    assert tools.diagnose_change_from(earlier) == CacheDiagnosis("changed", "tools", REUSABLE - 32, REUSABLE)
    messages = fingerprint([*TOKENS[:40], -1, *TOKENS[41:], 7], ["b"])
    assert messages.diagnose_change_from(earlier) == CacheDiagnosis("changed", "messages", REUSABLE - 32, REUSABLE)
    short = fingerprint([-1] * 40, ["b"])
    assert short.diagnose_change_from(earlier) == CacheDiagnosis("changed", "messages", 32, REUSABLE)
    settings = fingerprint([-1] * 100, ["b"], settings=1)
    assert settings.diagnose_change_from(earlier) == CacheDiagnosis("unavailable")


def test_diagnosis_is_unchanged_without_lost_blocks_or_changed_parts() -> None:
    earlier = fingerprint(TOKENS, ["a"])
    for later in (
        fingerprint([*TOKENS, 1, 2], ["a", "b"]),
        fingerprint(TOKENS, ["b"], tools=[1], settings=1),  # the template renders none of the changed parts
        fingerprint(TOKENS[:50], ["b"]),  # a prefix of the earlier prompt
        fingerprint([-1] * 200, ["a", "b"]),  # the template renders earlier messages differently
    ):
        assert later.diagnose_change_from(earlier) == CacheDiagnosis("unchanged")


def test_diagnosis_of_prompts_below_one_block_compares_their_parts() -> None:
    earlier = fingerprint([1] * 15, ["a"])
    assert fingerprint([2] * 15, ["b"]).diagnose_change_from(earlier) == CacheDiagnosis("changed", "messages")
    assert fingerprint([2] * 80, ["a", "b"]).diagnose_change_from(earlier) == CacheDiagnosis("unchanged")
    assert earlier.diagnose_change_from(fingerprint(TOKENS, ["b"])) == CacheDiagnosis(
        "changed", "messages", 0, REUSABLE
    )


def test_diagnosis_of_other_model_loses_all_blocks() -> None:
    earlier = make_fingerprint({}, ["a"], TOKENS, ()).with_model("m", "1")
    later = make_fingerprint({}, ["a"], TOKENS, ()).with_model("m", "2")
    assert later.diagnose_change_from(earlier) == CacheDiagnosis("changed", "model", REUSABLE, REUSABLE)


def test_diagnosis_distinguishes_images_by_content() -> None:
    cat, dog = (
        make_fingerprint({}, [name.decode()], [9] * 64, [MediaSpan(start=20, count=8, digest=name * 16)]).with_model(
            "m"
        )
        for name in (b"c", b"d")
    )
    assert cat.diagnose_change_from(dog) == CacheDiagnosis("changed", "messages", 48, 64)


@given(
    one=st.lists(st.integers(0, 3), max_size=80),
    other=st.lists(st.integers(0, 3), max_size=80),
    common=st.lists(st.integers(0, 3), max_size=80),
)
def test_missed_tokens_are_whole_blocks_that_differ(one: list[int], other: list[int], common: list[int]) -> None:
    earlier, later = common + one, common + other
    found = fingerprint(later, ["b"]).diagnose_change_from(fingerprint(earlier, ["a"]))
    blocks = [
        [tokens[at : at + BLOCK_TOKENS] for at in range(0, len(tokens), BLOCK_TOKENS)] for tokens in (earlier, later)
    ]
    full = [[block for block in each if len(block) == BLOCK_TOKENS] for each in blocks]
    equal = 0
    while equal < min(map(len, full)) and full[0][equal] == full[1][equal]:
        equal += 1
    assert found.missed_tokens == (min(map(len, full)) - equal) * BLOCK_TOKENS
    assert (found.outcome == "changed") == (found.missed_tokens > 0 or min(map(len, full)) == 0)


def test_fingerprint_holds_no_text_and_few_bytes_per_token() -> None:
    secret = fingerprint(list(range(16_000)), ["secret"] * 10, system=["secret"])
    encoded = msgspec.msgpack.encode(secret)
    assert b"secret" not in encoded
    assert len(encoded) < 16_000 / 2 + 500
    assert msgspec.msgpack.decode(encoded, type=PromptFingerprint) == secret


def test_recent_prompts_are_found_only_by_owner_and_salt() -> None:
    recent = RecentPrompts()
    one = fingerprint(TOKENS, ["a"])
    recent.add_prompt("me", "salt", "msg_1", one)
    assert recent.find_prompt("me", "salt", "msg_1") is one
    for other in (("you", "salt", "msg_1"), ("me", "", "msg_1"), ("me", "salt", "msg_2")):
        assert recent.find_prompt(*other) is None


def test_long_cache_salts_take_no_more_memory_than_is_counted() -> None:
    one, recent = fingerprint([], []), RecentPrompts()
    tracemalloc.start()
    try:
        for number in range(200):
            recent.add_prompt("me", f"{number:_>1024}\U0001f600", f"msg_{number}", one)
        assert tracemalloc.get_traced_memory()[0] < recent.total_bytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("limit", [0, 10_000])
def test_recent_prompts_forget_oldest_of_large_owners(limit: int) -> None:
    one = fingerprint(TOKENS, ["a"])
    recent = RecentPrompts(max_owner_bytes=5 * one.num_bytes, max_total_bytes=limit and 8 * one.num_bytes)
    recent.add_prompt("small", "", "msg_0", one)
    for number in range(20):
        recent.add_prompt("large", "", f"msg_{number}", one)
        recent.add_prompt("large", "", f"msg_{number}", one)
    known = [number for number in range(20) if recent.find_prompt("large", "", f"msg_{number}")]
    if not limit:
        assert (known, recent.total_bytes) == ([], 0)
        return
    assert known == [15, 16, 17, 18, 19]
    assert recent.total_bytes == 6 * one.num_bytes
    for owner in ("b", "c", "d"):
        recent.add_prompt(owner, "", "msg_0", one)
    assert recent.find_prompt("large", "", "msg_15") is None, "the largest owner makes room"
    assert all(recent.find_prompt(owner, "", "msg_0") for owner in ("small", "b", "c", "d"))
    assert recent.total_bytes == 8 * one.num_bytes
