from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.server.formats.tools import strict_json


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    index: int
    """Position among the message's calls, from 0."""
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class ToolCallSink:
    """Whitespace around calls is not content. Unreadable text goes to the open call's arguments, or to content if no
    call is open.
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

    @property
    def all_complete(self) -> bool:
        return self._num_opened > 0 and self._num_complete == self._num_opened

    def add_content(self, text: str) -> None:
        text = self._pending_space + text
        shown = text.rstrip()
        self._pending_space = text[len(shown) :]
        if shown:
            self._content.append(shown)

    def open_call(self, name: str, id: str = "") -> None:
        """Replaces an empty or repeated `id`."""
        self._pending_space = ""
        self._arguments = []
        self.last_complete = False
        self._num_opened += 1
        if self._is_within_limit:
            id = id if id and id not in self._ids else self._new_id(self._num_opened)
            self._ids.add(id)
            self._calls.append(ToolCallDelta(self._num_opened - 1, id=id, name=name))

    def add_arguments(self, piece: str) -> None:
        if not piece:
            return
        self._arguments.append(piece)
        if self._is_within_limit:
            self._calls.append(ToolCallDelta(self._num_opened - 1, piece))

    def close_call(self) -> None:
        if self.last_complete:
            return
        try:
            strict_json.parse_json("".join(self._arguments))
        except ValueError:
            return
        self._num_complete += 1
        self.last_complete = True

    def add_call(self, name: str, arguments: str) -> None:
        self.open_call(name)
        self.add_arguments(arguments)
        self.close_call()

    def finish_content(self) -> None:
        """Trailing whitespace is content only if there are no calls."""
        if not self._num_opened and self._pending_space:
            self._content.append(self._pending_space)
        self._pending_space = ""

    def drain_deltas(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        content, calls = "".join(self._content), tuple(self._calls)
        self._content, self._calls = [], []
        return content, calls

    @property
    def _is_within_limit(self) -> bool:
        return self._max_calls is None or self._num_opened <= self._max_calls
