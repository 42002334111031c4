"""Which job is next: tenants take turns, by the time that they have used; the kinds of a tenant's jobs take turns;
within a kind, the smallest and oldest job is first."""

from __future__ import annotations

from asyncio import Future
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.engine import clock
from quire.server.access.tenants import Tenant

LARGE_BYTES = 1 << 16
"""Jobs from this size on never take all workers."""
_BYTES_PER_SECOND = 1e6
"""A job of so many bytes more is served as if it had come a second later: small ones are not held up by large ones."""


@dataclass(eq=False, slots=True)
class WorkerTurn:
    """A job that waits for a worker, or has one."""

    tenant: Tenant
    size: int
    """Bytes of its input."""
    granted: Future[None]
    slow: bool = False
    """Whether it may take seconds however small it is."""
    arrived: float = field(default_factory=lambda: clock.monotonic())
    began: float = 0.0

    @property
    def large(self) -> bool:
        return self.slow or self.size >= LARGE_BYTES

    @property
    def kind(self) -> int:
        """Jobs that take about as long. Many of one kind do not hold up another, where all callers are one tenant."""
        return -1 if self.slow else self.size.bit_length() // 4

    @property
    def keys(self) -> tuple[str, tuple[str, int]]:
        """Those who get time in turn: the tenant, and this kind of its jobs."""
        return self.tenant.name, (self.tenant.name, self.kind)

    @property
    def due(self) -> float:
        return self.arrived + self.size / _BYTES_PER_SECOND


class JobQueue:
    """Grants `slots` turns at once."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._waiting: list[WorkerTurn] = []
        self._running: set[WorkerTurn] = set()
        self._tenants: dict[str, float] = {}
        """Seconds of workers by tenant, divided by its weight; only of tenants that have a job here."""
        self._kinds: dict[tuple[str, int], float] = {}
        """The same by the kinds of each tenant's jobs."""
        self._jobs: Counter[str | tuple[str, int]] = Counter()
        """How many of each tenant, and of each of its kinds, are here."""

    def __len__(self) -> int:
        return len(self._waiting)

    def fail(self, error: Exception) -> None:
        """Let all that wait raise `error`."""
        for turn in self._waiting:
            if not turn.granted.done():
                turn.granted.set_exception(error)

    def add(self, turn: WorkerTurn) -> None:
        # A newcomer begins where the least served one is: it has no claim to the time when it was away.
        tenant, kind = turn.keys
        self._tenants.setdefault(tenant, min(self._tenants.values(), default=0.0))
        siblings = [used for (name, _), used in self._kinds.items() if name == tenant]
        self._kinds.setdefault(kind, min(siblings, default=0.0))
        self._jobs.update(turn.keys)
        self._waiting.append(turn)
        self._grant()

    def end(self, turn: WorkerTurn) -> None:
        """The job has ended, or is given up."""
        tenant, kind = turn.keys
        if turn in self._running:
            self._running.remove(turn)
            seconds = (clock.monotonic() - turn.began) / turn.tenant.weight
            self._tenants[tenant] += seconds
            self._kinds[kind] += seconds
        else:
            self._waiting.remove(turn)
        self._jobs.subtract(turn.keys)
        if not self._jobs[tenant]:
            del self._jobs[tenant], self._tenants[tenant]
        if not self._jobs[kind]:
            del self._jobs[kind], self._kinds[kind]
        self._grant()

    def _grant(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            full = sum(turn.large for turn in self._running) >= max(1, self._slots - 1)
            candidates = [turn for turn in self._waiting if not (turn.granted.done() or (turn.large and full))]
            if not candidates:
                return
            turn = min(candidates, key=self._order(clock.monotonic()))
            self._waiting.remove(turn)
            self._running.add(turn)
            turn.began = clock.monotonic()
            turn.granted.set_result(None)

    def _order(self, now: float) -> Callable[[WorkerTurn], tuple[float, float, float]]:
        """What the tenant has had, its running jobs included, and the kind; when the job is due."""
        tenants, kinds = self._tenants.copy(), self._kinds.copy()
        for running in self._running:
            tenant, kind = running.keys
            seconds = (now - running.began) / running.tenant.weight
            tenants[tenant] += seconds
            kinds[kind] += seconds
        return lambda turn: (tenants[turn.keys[0]], kinds[turn.keys[1]], turn.due)
