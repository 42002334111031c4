"""The way of a chat through the code is the one that docs/way.md shows."""

from __future__ import annotations

import re

import pytest

from tests.way import WAY, lines_of, traced

MOST_LINES = 8000
"""Of the functions that run for a chat: an afternoon's reading."""


@pytest.mark.slow
def test_the_way_is_short_and_as_documented() -> None:
    calls = traced()
    assert 1000 < lines_of(calls) < MOST_LINES
    documented = set(re.findall(r"^\| \w+ \| `([\w/.]+)`", WAY.read_text(encoding="utf-8"), re.MULTILINE))
    ran = {call.path for call in calls}
    advice = "`python -m tests.way` traces the way afresh"
    assert len(documented ^ ran) <= 0.1 * len(ran), f"{sorted(documented ^ ran)}; {advice}"
