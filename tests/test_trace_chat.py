"""A chat passes the stations that docs/internals/request-lifecycle.md describes, in their order."""

from __future__ import annotations

import pytest

from tests.trace_chat import lines_of, traced

STATIONS = (
    "quire/server/pipeline/answer.py",
    "quire/server/pipeline/read.py",
    "quire/server/resolve/parse.py",
    "quire/server/resolve/chat.py",
    "quire/server/pipeline/authorize.py",
    "quire/server/pipeline/admit.py",
    "quire/server/generation/sampling_generation.py",
    "quire/server/pipeline/write.py",
)
MAX_LINES = 8000
"""Of the functions that run for a chat: an afternoon's reading."""


@pytest.mark.slow
def test_a_chat_passes_the_stations_in_their_order() -> None:
    calls = traced()
    assert 1000 < lines_of(calls) < MAX_LINES
    first_calls = [next(call.when for call in calls if call.path == station) for station in STATIONS]
    assert first_calls == sorted(first_calls)
