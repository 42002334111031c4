"""Decides which open requests to submit, so that a request that crashes engines cannot do so forever.

If the engine itself was at fault, requests that had begun but made little progress become suspects. Bisection isolates
them: half of the suspects run first, without other requests, then half of that half, finally a single one. A request
that repeatedly ends an engine in which it is alone is given up. A process ended from outside makes no suspects and
clears none.

Uses no clock and no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

TOKENS_TO_CLEAR = 4
"""Tokens from one engine that clear a request. The first shows that its prompt is harmless, the others show it of
decoding.
"""
MAX_LONE_CRASHES = 2
"""A request is given up after ending this many engines in which it was alone."""


class Replay:
    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        """Ordinary requests that the engine does not have, in order of submission."""
        self._suspects: deque[list[str]] = deque()
        """Groups of suspects that the engine does not have. Each runs without other requests, before `_waiting`."""
        self._submitted: dict[str, int] = {}
        """Requests that the engine has, with the number of tokens received, up to TOKENS_TO_CLEAR."""
        self._begun: set[str] = set()
        """Requests that this engine has begun to compute."""
        self._isolated: set[str] = set()
        """Uncleared suspects that the engine has. Nothing else is submitted meanwhile."""
        self._lone_crashes: dict[str, int] = {}
        """Number of successive engines that each request ended while it was alone."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._submitted) + sum(map(len, self._suspects))

    @property
    def idle(self) -> bool:
        return not self._submitted

    def add(self, request_id: str) -> None:
        self._waiting[request_id] = None

    def begin(self, request_ids: Iterable[str]) -> None:
        """The engine is about to compute these requests for the first time."""
        self._begun.update(request_id for request_id in request_ids if request_id in self._submitted)

    def progress(self, request_id: str, tokens: int, *, ended: bool = False) -> None:
        if ended:
            return self.end(request_id)
        num_tokens = self._submitted.get(request_id, TOKENS_TO_CLEAR)
        if num_tokens < TOKENS_TO_CLEAR:
            self._submitted[request_id] = num_tokens + tokens
            if num_tokens + tokens >= TOKENS_TO_CLEAR:
                self._isolated.discard(request_id)
                self._lone_crashes.pop(request_id, None)

    def end(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._submitted.pop(request_id, None)
        self._begun.discard(request_id)
        self._isolated.discard(request_id)
        self._lone_crashes.pop(request_id, None)
        for group in self._suspects:
            if request_id in group:
                group.remove(request_id)

    def take_ready(self) -> list[str]:
        ready: list[str] = []
        while not self._isolated and (self._suspects or self._waiting):
            if self._suspects:
                group = self._suspects.popleft()
                self._isolated.update(group)
            else:
                group, self._waiting = list(self._waiting), {}
            self._submitted |= dict.fromkeys(group, 0)
            ready += group
        return ready

    @property
    def isolating(self) -> bool:
        return bool(self._isolated)

    def take_unsuspected(self) -> list[str]:
        """Another engine may get these requests."""
        taken, self._waiting = list(self._waiting), {}
        return taken

    def engine_exited(self, *, external: bool) -> list[str]:
        """Return the requests to give up; the caller calls `end` for each."""
        if external:
            suspects = [request_id for request_id in self._submitted if request_id in self._isolated]
        else:
            suspects = self._new_suspects()
        given_up = []
        if not external and len(self._submitted) == 1 and suspects:
            self._lone_crashes[suspects[0]] = self._lone_crashes.get(suspects[0], 0) + 1
            given_up = [suspects[0]] if self._lone_crashes[suspects[0]] == MAX_LONE_CRASHES else []
        half = len(suspects) if external else (len(suspects) + 1) // 2
        self._suspects.extendleft(group for group in (suspects[half:], suspects[:half]) if group)
        suspected = set(suspects)
        others = [request_id for request_id in self._submitted if request_id not in suspected]
        self._waiting = dict.fromkeys([*others, *self._waiting])
        self._submitted = {}
        self._begun = set()
        self._isolated = set()
        return given_up

    def _new_suspects(self) -> list[str]:
        """If no uncleared request had begun, returns all uncleared ones, because the engine may have ended while it
        accepted one of them.
        """
        uncleared = [request_id for request_id, tokens in self._submitted.items() if tokens < TOKENS_TO_CLEAR]
        return [request_id for request_id in uncleared if request_id in self._begun] or uncleared
