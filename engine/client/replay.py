"""Which open requests an engine gets, one life after another, so that one that kills engines cannot do so for ever.

After a death everything open is replayed. When an engine ended by its own doing, those of its requests that had begun
and had not come far are suspects: they are replayed first and by themselves, in halves, then alone, and nobody else
until they are cleared by some tokens or an end. A request that twice ends an engine it has for itself is given up.
A death from outside is held against nobody: all go on as they were, suspects as suspects.

Pure decisions about request ids: no clock, no input or output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

CLEARED = 4
"""Tokens in one life that clear a request: the first comes of computing its prompt, the others of going on."""
STRIKES = 2
"""Lives of its own that a request may end before it comes so far."""


class Replay:
    """Requests are added, begin, make progress and end; `release()` says which to submit to the engine now."""

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        self._suspects: deque[list[str]] = deque()
        """Groups to be tried one after the other, each before all that waits."""
        self._sent: dict[str, int] = {}
        """What the engine has, with the tokens that came in this life."""
        self._begun: set[str] = set()
        """Those of them that were in a step."""
        self._trial: set[str] = set()
        """Suspects that the engine has; nothing more is sent before they are cleared."""
        self._strikes: dict[str, int] = {}

    @property
    def idle(self) -> bool:
        """The engine has nothing of ours."""
        return not self._sent

    def add(self, request_id: str) -> None:
        self._waiting[request_id] = None

    def begin(self, request_ids: Iterable[str]) -> None:
        """The engine is about to compute these for the first time."""
        self._begun.update(request_id for request_id in request_ids if request_id in self._sent)

    def progress(self, request_id: str, tokens: int) -> None:
        """It got some tokens."""
        if request_id in self._sent:
            self._sent[request_id] += tokens
            if self._sent[request_id] >= CLEARED:
                self._trial.discard(request_id)
                self._strikes.pop(request_id, None)

    def end(self, request_id: str) -> None:
        """It is answered, aborted or given up."""
        self._waiting.pop(request_id, None)
        self._sent.pop(request_id, None)
        self._begun.discard(request_id)
        self._trial.discard(request_id)
        self._strikes.pop(request_id, None)
        for group in self._suspects:
            if request_id in group:
                group.remove(request_id)

    def release(self) -> list[str]:
        """Take the requests that may go to the engine now, in order."""
        released: list[str] = []
        while not self._trial and (self._suspects or self._waiting):
            if self._suspects:
                group = self._suspects.popleft()
                self._trial.update(group)
            else:
                group, self._waiting = list(self._waiting), {}
            self._sent |= dict.fromkeys(group, 0)
            released += group
        return released

    def engine_died(self, *, outside: bool) -> list[str]:
        """Everything sent must be sent again. Returns the requests to give up; call `end` for them."""
        tried = [request_id for request_id in self._sent if request_id in self._trial]
        suspects = tried if outside else self._suspected()
        given_up = []
        if not outside and len(self._sent) == 1 and suspects:
            self._strikes[suspects[0]] = self._strikes.get(suspects[0], 0) + 1
            given_up = [suspects[0]] if self._strikes[suspects[0]] == STRIKES else []
        half = len(suspects) if outside else (len(suspects) + 1) // 2
        self._suspects.extendleft(group for group in (suspects[half:], suspects[:half]) if group)
        accused = set(suspects)
        others = [request_id for request_id in self._sent if request_id not in accused]
        self._waiting = dict.fromkeys([*others, *self._waiting])
        self._sent, self._begun, self._trial = {}, set(), set()
        return given_up

    def _suspected(self) -> list[str]:
        """Who may have ended the engine: what had begun and is not cleared; without such, what it was taking in."""
        open_ones = [request_id for request_id, tokens in self._sent.items() if tokens < CLEARED]
        return [request_id for request_id in open_ones if request_id in self._begun] or open_ones
