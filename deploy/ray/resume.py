"""Continues a stream from another replica after its own has ended: by a call for the rest if a journal has it
(KeptStream), otherwise by the same call, for OpenAI's chunks (ResumableStream).

The same seed gives the same tokens, so the other replica's text begins with what the client has. Event boundaries
depend on timing, so texts are compared, not events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from deploy.ray.call import Call, Head, continued
from quire.engine.common.errors import EngineError
from quire.server.encoding import DONE_EVENT, EVENT_END, EVENT_PREFIX, encode_json

_TEXTS = frozenset({"arguments", "content", "reasoning", "reasoning_content", "refusal", "text"})
"""Fields that a client concatenates."""
_LISTS = frozenset({"content", "refusal", "token_ids", "tokens", "token_logprobs", "top_logprobs", "text_offset"})
_INDEXED = frozenset({"choices", "tool_calls"})
"""Lists whose items name their position in `index`."""
_MISSING = object()

Path = tuple[str | int, ...]
"""Keys from an event's top to a field; in _INDEXED lists, the item's index."""


class KeptStream:
    """Tracks a client's position by event ids."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._id: bytes | None = None
        self._last: bytes | None = None

    @property
    def call(self) -> Call | None:
        """Requests the rest; None if the stream cannot continue."""
        return None if self._id is None else continued(self._call, self._id, self._last)

    def begins(self, head: Head) -> None:
        self._id = head.named(b"x-stream-id") if head.is_stream else None

    def note(self, events: bytes) -> bytes:
        """`events`: whole events that the client gets."""
        if self._id is not None:
            begin = b"\nid: %b:" % self._id
            _, found, rest = (b"\n" + events).rpartition(begin)
            if found:
                self._last = b"%b:%b" % (self._id, rest.partition(b"\n")[0])
        return events


class ResumableStream:
    """What the client has of a stream, and what it needs of later runs."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []
        self._had: dict[Path, Any] | None = None
        """What the client had at the start of the current run, by field; None in the first run."""
        self._read: dict[Path, int] = {}
        """Characters or items of this run, by field."""

    @property
    def ended(self) -> bool:
        return bool(self._sent) and self._sent[-1].endswith(DONE_EVENT)

    def restart(self) -> None:
        """`next` gets another run's events from now on, from its first."""
        self._had, self._read = {}, {}
        for event in _events(b"".join(self._sent)):
            if (chunk := _chunk(event)) is not None:
                _note(chunk, (), self._had)

    def next(self, events: bytes) -> bytes:
        """The part of whole events that the client lacks.

        Raises EngineError if the run's text differs from the client's.
        """
        new = events
        if self._had is not None:
            new = b"".join(self._new(event, self._had) for event in _events(events))
        if new:
            self._sent.append(new)
        return new

    def _new(self, event: bytes, had: dict[Path, Any]) -> bytes:
        chunk = _chunk(event)
        if chunk is None:
            return event
        same = {name: had[name,] for name in ("id", "created") if (name,) in had}
        if not chunk["choices"]:  # final usage
            return EVENT_PREFIX + encode_json(chunk | same) + EVENT_END
        rest, is_new = self._rest(chunk, (), had)
        return EVENT_PREFIX + encode_json(rest | same) + EVENT_END if is_new else b""

    def _rest(self, value: Any, path: Path, had: dict[Path, Any]) -> tuple[Any, bool]:
        """The value without what the client has (_MISSING to leave it out), and whether any of it is new."""
        if isinstance(value, dict):
            rests = {key: self._rest(each, (*path, key), had) for key, each in value.items()}
            kept = {key: rest for key, (rest, _) in rests.items() if rest is not _MISSING}
            return kept, any(is_new for _, is_new in rests.values())
        if isinstance(value, list) and path[-1] in _INDEXED:
            items = [self._rest(each, (*path, each["index"]), had) for each in value]
            kept_items = [rest for rest, is_new in items if is_new]
            return kept_items or _MISSING, bool(kept_items)
        if _grows(value, path):
            before, start = had.get(path, value[:0]), self._read.get(path, 0)
            overlap = before[start : start + len(value)]
            if isinstance(value, str) and not value.startswith(overlap):
                raise EngineError("the replica ended, and another one computed other tokens")
            self._read[path] = start + len(value)
            return value[len(overlap) :], len(value) > len(overlap)
        told = path in had
        if told and "delta" in path and path[-1] != "index":
            return _MISSING, False  # clients also concatenate names and ids of calls
        return value, value is not None and not told


def _events(data: bytes) -> Iterator[bytes]:
    return (event + EVENT_END for event in data.split(EVENT_END) if event)


def _chunk(event: bytes) -> dict[str, Any] | None:
    """None for comments, errors and the end."""
    if not event.startswith(EVENT_PREFIX) or event == DONE_EVENT:
        return None
    chunk = msgspec.json.decode(event.removeprefix(EVENT_PREFIX))
    return chunk if "choices" in chunk else None


def _grows(value: Any, path: Path) -> bool:
    return (isinstance(value, str) and path[-1] in _TEXTS) or (isinstance(value, list) and path[-1] in _LISTS)


def _note(value: Any, path: Path, had: dict[Path, Any]) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _note(each, (*path, key), had)
    elif isinstance(value, list) and path[-1] in _INDEXED:
        for each in value:
            _note(each, (*path, each["index"]), had)
    elif _grows(value, path):
        had[path] = had.get(path, value[:0]) + value
    elif value is not None:
        had.setdefault(path, value)
