"""Collects what a tool parser finds: content, and calls whose arguments come in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.server.formats.tools import strict_json


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The opening of a call, with its id and name, or a piece of its arguments."""

    index: int
    """The index of the call in its message, from 0."""
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class ToolCallSink:
    """Collects what is found between two calls of `drain_deltas`.

    White space before and after calls is not content. Text of a call that cannot be read is kept as it was written: in
    the call's arguments if the call was opened, otherwise in the content.
    """

    def __init__(self, new_id: Callable[[int], str], max_calls: int | None = None) -> None:
        self._new_id = new_id
        self._max_calls = max_calls
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._pending_space = ""
        self._arguments: list[str] = []
        self._ids: set[str] = set()
        self._num_opened = 0
        self._num_complete = 0
        self.last_complete = False
        """Whether the call opened last was closed with arguments that are JSON."""

    @property
    def all_complete(self) -> bool:
        """Whether there were calls, and each was closed with arguments that are JSON."""
        return self._num_opened > 0 and self._num_complete == self._num_opened

    def add_content(self, text: str) -> None:
        text = self._pending_space + text
        shown = text.rstrip()
        self._pending_space = text[len(shown) :]
        if shown:
            self._content.append(shown)

    def open_call(self, name: str, id: str = "") -> None:
        """A call begins. `id`: what the model wrote as its id, if it may stand; ids are unique in a message."""
        self._pending_space = ""
        self._arguments = []
        self.last_complete = False
        self._num_opened += 1
        if self._is_within_limit:
            id = id if id and id not in self._ids else self._new_id(self._num_opened)
            self._ids.add(id)
            self._calls.append(ToolCallDelta(self._num_opened - 1, id=id, name=name))

    def add_arguments(self, piece: str) -> None:
        """More of the open call's arguments, as JSON text."""
        if not piece:
            return
        self._arguments.append(piece)
        if self._is_within_limit:
            self._calls.append(ToolCallDelta(self._num_opened - 1, piece))

    def close_call(self) -> None:
        """The open call is complete."""
        if self.last_complete:
            return
        try:
            strict_json.parse_json("".join(self._arguments))
        except ValueError:
            return
        self._num_complete += 1
        self.last_complete = True

    def add_call(self, name: str, arguments: str) -> None:
        """Add a call that was read as a whole."""
        self.open_call(name)
        self.add_arguments(arguments)
        self.close_call()

    def finish_content(self) -> None:
        """The text is over. Without calls, white space at its end is content."""
        if not self._num_opened and self._pending_space:
            self._content.append(self._pending_space)
        self._pending_space = ""

    def drain_deltas(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Content and calls since the last call of drain."""
        content, calls = "".join(self._content), tuple(self._calls)
        self._content, self._calls = [], []
        return content, calls

    @property
    def _is_within_limit(self) -> bool:
        return self._max_calls is None or self._num_opened <= self._max_calls
