"""A chat passes the stations of docs/internals/request-lifecycle.md in order."""

from __future__ import annotations

import pytest

from tests.trace_chat import lines_of, named, room_changes, traced

STATIONS = (
    "answer",
    "resolve_body",
    "read_body",
    "parse_body",
    "resolve_chat_request",
    "authorize",
    "identify",
    "admit",
    "generate",
    "SamplingGeneration.__init__",
    "write_answer",
    "stream_events",
)
MAX_LINES = 8000
"""Lines of the functions that run for a chat: an afternoon's reading."""
MAX_FILES = 114
"""Files of these functions. A feature that a plain chat does not use is decided once or by a field of the request."""
MAX_ROOM_CHANGES = 240
"""Maximum number of times that the path enters another folder. Two runs differ by about ten."""


@pytest.mark.slow
def test_chat_passes_pipeline_stations_in_order() -> None:
    calls = traced()
    assert 1000 < lines_of(calls) < MAX_LINES
    assert 50 < len({call.path for call in calls if call.process != "worker"}) < MAX_FILES
    assert sum(room_changes(named(calls), process) for process in ("server", "engine")) < MAX_ROOM_CHANGES
    first_calls = [next(call.when for call in calls if call.name == station) for station in STATIONS]
    assert first_calls == sorted(first_calls)
