"""Which open requests an engine gets, one life after another, so that one that kills engines cannot do so for ever.

After a death everything open is replayed. A request that has been through two lives in a row without a token of its
own is a suspect: suspects are replayed first and by themselves, in halves, then alone, and nobody else until they are
cleared by a token or an end. Only a request that alone ends three engines in a row is given up. So whoever kills
engines from outside, however often, costs time and no request.

Pure decisions about request ids: no clock, no input or output.
"""

from __future__ import annotations

from collections import deque

SUSPECT_AFTER = 2
"""Lives in a row without progress."""
STRIKES = 3
"""Lives in a row that ended during a lone replay."""


class Replay:
    """Requests are added, make progress and end; `release()` says which to submit to the engine now."""

    def __init__(self) -> None:
        self._fruitless: dict[str, int] = {}
        self._strikes: dict[str, int] = {}
        self._sent: dict[str, None] = {}
        self._trial: set[str] = set()
        """Requests under suspicion that the engine has; nothing more is sent before they are cleared."""
        self._groups: deque[list[str]] = deque()
        """What waits, group by group; all but the last are suspects."""

    def add(self, request_id: str) -> None:
        self._fruitless[request_id] = 0
        if not self._groups:
            self._groups.append([])
        self._groups[-1].append(request_id)

    def progress(self, request_id: str) -> None:
        """It got a token."""
        self._fruitless[request_id] = 0
        self._strikes.pop(request_id, None)
        self._trial.discard(request_id)

    def end(self, request_id: str) -> None:
        """It is answered or aborted."""
        self._fruitless.pop(request_id, None)
        self._strikes.pop(request_id, None)
        self._sent.pop(request_id, None)
        self._trial.discard(request_id)
        for group in self._groups:
            if request_id in group:
                group.remove(request_id)

    def release(self) -> list[str]:
        """Take the requests that may go to the engine now, in order."""
        released: list[str] = []
        while self._groups and not self._trial:
            group = self._groups.popleft()
            if self._groups:
                self._trial.update(group)
            self._sent |= dict.fromkeys(group)
            released += group
        return released

    def engine_died(self) -> list[str]:
        """Everything sent must be sent again. Returns the requests to give up, which have ended."""
        given_up = []
        for request_id in self._sent:
            self._fruitless[request_id] += 1
        if len(self._sent) == 1 and self._fruitless[alone := next(iter(self._sent))] > SUSPECT_AFTER:
            self._strikes[alone] = self._strikes.get(alone, 0) + 1
            if self._strikes[alone] == STRIKES:
                given_up.append(alone)
                self.end(alone)
        everyone = [*self._sent, *(request_id for group in self._groups for request_id in group)]
        suspects = [request_id for request_id in self._sent if self._fruitless[request_id] >= SUSPECT_AFTER]
        others = [request_id for request_id in everyone if request_id not in set(suspects)]
        waiting = [group for group in list(self._groups)[:-1] if group]
        half = (len(suspects) + 1) // 2
        first = [group for group in (suspects[:half], suspects[half:]) if group]
        held = {request_id for group in waiting for request_id in group}
        self._groups = deque([*first, *waiting, [request_id for request_id in others if request_id not in held]])
        self._sent, self._trial = {}, set()
        return given_up
