"""Continues a stream that a replica's end cut off, from another replica's answer: to a call for what follows in it,
where a journal has it (KeptStream), or else to the same call, where it is one of OpenAI's chunks (ResumableStream).

The same seed gives the same tokens, so the other replica's text begins with what the client has. How the text is cut
into events depends on when it was computed, so texts are compared, not events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from deploy.ray.call import Call, Head, continued
from quire.engine.common.errors import EngineError
from quire.server.encoding import DONE_EVENT, EVENT_END, EVENT_PREFIX, encode_json

_TEXTS = frozenset({"arguments", "content", "reasoning", "reasoning_content", "refusal", "text"})
"""Fields whose values a client joins."""
_LISTS = frozenset({"content", "refusal", "token_ids", "tokens", "token_logprobs", "top_logprobs", "text_offset"})
_INDEXED = frozenset({"choices", "tool_calls"})
"""Lists whose items say by `index` what they belong to."""
_MISSING = object()

Path = tuple[str | int, ...]
"""Keys from an event's top to a field; of a list in _INDEXED the item's index."""


class KeptStream:
    """How far a client is in a stream whose events have ids."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._id: bytes | None = None
        self._last: bytes | None = None
        """The id of the last event."""

    @property
    def call(self) -> Call | None:
        """For what the client does not have; None where nobody can go on with it."""
        return None if self._id is None else continued(self._call, self._id, self._last)

    def begins(self, head: Head) -> None:
        self._id = head.named(b"x-stream-id") if head.is_stream else None

    def note(self, events: bytes) -> bytes:
        """These events, which are whole, and which the client gets."""
        if self._id is not None:
            begin = b"\nid: %b:" % self._id
            _, found, rest = (b"\n" + events).rpartition(begin)
            if found:
                self._last = b"%b:%b" % (self._id, rest.partition(b"\n")[0])
        return events


class ResumableStream:
    """What the client has of a stream, and what it still needs of other runs of the same request."""

    def __init__(self) -> None:
        self._sent: list[bytes] = []
        self._had: dict[Path, Any] | None = None
        """By field: what the client had when the last run began; None during the first run."""
        self._read: dict[Path, int] = {}
        """By field: how many characters or items this run gave."""

    @property
    def ended(self) -> bool:
        """Whether the client has all of it."""
        return bool(self._sent) and self._sent[-1].endswith(DONE_EVENT)

    def restart(self) -> None:
        """From now on `next` gets another run's events, from the first one on."""
        self._had, self._read = {}, {}
        for event in _events(b"".join(self._sent)):
            if (chunk := _chunk(event)) is not None:
                _note(chunk, (), self._had)

    def next(self, events: bytes) -> bytes:
        """What of these events, which are whole, the client does not have yet.

        Raises EngineError where the run's text is not that which the client has.
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
        if not chunk["choices"]:  # the usage at the end
            return EVENT_PREFIX + encode_json(chunk | same) + EVENT_END
        rest, is_new = self._rest(chunk, (), had)
        return EVENT_PREFIX + encode_json(rest | same) + EVENT_END if is_new else b""

    def _rest(self, value: Any, path: Path, had: dict[Path, Any]) -> tuple[Any, bool]:
        """A value without what the client has of it (_MISSING if it has to be left out), and whether the client misses
        any of it."""
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
            return _MISSING, False  # clients join the names and ids of calls too
        return value, value is not None and not told


def _events(data: bytes) -> Iterator[bytes]:
    """The events with their ends."""
    return (event + EVENT_END for event in data.split(EVENT_END) if event)


def _chunk(event: bytes) -> dict[str, Any] | None:
    """An event's chunk; None for comments, errors and the end."""
    if not event.startswith(EVENT_PREFIX) or event == DONE_EVENT:
        return None
    chunk = msgspec.json.decode(event.removeprefix(EVENT_PREFIX))
    return chunk if "choices" in chunk else None


def _grows(value: Any, path: Path) -> bool:
    return (isinstance(value, str) and path[-1] in _TEXTS) or (isinstance(value, list) and path[-1] in _LISTS)


def _note(value: Any, path: Path, had: dict[Path, Any]) -> None:
    """Add a value of an event to what the client has."""
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
