"""Chooses the next job. The tenant whose jobs have used the least time goes first; within a tenant, the same holds for
kinds of jobs. Within a kind, small and old jobs come first.
"""

from __future__ import annotations

from asyncio import Future
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.engine.common import clock
from quire.server.access.tenants import Tenant

LARGE_BYTES = 1 << 16
"""Jobs of this size or more never use all workers at the same time."""
_BYTES_PER_SECOND = 1e6
"""Within its kind, a job counts as arriving one second later per this many bytes, so that large jobs do not delay small
ones.
"""


@dataclass(eq=False, slots=True)
class WorkerSlotClaim:
    tenant: Tenant
    size: int
    """Input bytes."""
    grant_future: Future[None]
    is_slow: bool = False
    """True if the job may take seconds, whatever its size."""
    arrived_at: float = field(default_factory=lambda: clock.monotonic())
    started_at: float = 0.0

    @property
    def is_large(self) -> bool:
        return self.is_slow or self.size >= LARGE_BYTES

    @property
    def duration_class(self) -> int:
        """Many jobs of one class do not delay another class, even of the same tenant."""
        return -1 if self.is_slow else self.size.bit_length() // 4

    @property
    def tenant_and_class_keys(self) -> tuple[str, tuple[str, int]]:
        return self.tenant.name, (self.tenant.name, self.duration_class)

    @property
    def virtual_arrival(self) -> float:
        return self.arrived_at + self.size / _BYTES_PER_SECOND


class JobQueue:
    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._waiting: list[WorkerSlotClaim] = []
        self._running: set[WorkerSlotClaim] = set()
        self._seconds_by_tenant: dict[str, float] = {}
        """Worker seconds divided by the tenant's weight, for tenants with waiting or running jobs."""
        self._seconds_by_class: dict[tuple[str, int], float] = {}
        self._num_jobs: Counter[str | tuple[str, int]] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def fail_waiting_jobs(self, error: Exception) -> None:
        for claim in self._waiting:
            if not claim.grant_future.done():
                claim.grant_future.set_exception(error)

    def add_job(self, claim: WorkerSlotClaim) -> None:
        # A newcomer starts with as much time as the least served one, so that it gets no credit for its absence.
        tenant, kind = claim.tenant_and_class_keys
        self._seconds_by_tenant.setdefault(tenant, min(self._seconds_by_tenant.values(), default=0.0))
        siblings = [used for (name, _), used in self._seconds_by_class.items() if name == tenant]
        self._seconds_by_class.setdefault(kind, min(siblings, default=0.0))
        self._num_jobs.update(claim.tenant_and_class_keys)
        self._waiting.append(claim)
        self._grant_slots()

    def end_job(self, claim: WorkerSlotClaim) -> None:
        tenant, kind = claim.tenant_and_class_keys
        if claim in self._running:
            self._running.remove(claim)
            seconds = (clock.monotonic() - claim.started_at) / claim.tenant.weight
            self._seconds_by_tenant[tenant] += seconds
            self._seconds_by_class[kind] += seconds
        else:
            self._waiting.remove(claim)
        self._num_jobs.subtract(claim.tenant_and_class_keys)
        if not self._num_jobs[tenant]:
            del self._num_jobs[tenant], self._seconds_by_tenant[tenant]
        if not self._num_jobs[kind]:
            del self._num_jobs[kind], self._seconds_by_class[kind]
        self._grant_slots()

    def _grant_slots(self) -> None:
        while self._waiting and len(self._running) < self._num_slots:
            full = sum(claim.is_large for claim in self._running) >= max(1, self._num_slots - 1)
            candidates = [
                claim for claim in self._waiting if not (claim.grant_future.done() or (claim.is_large and full))
            ]
            if not candidates:
                return
            claim = min(candidates, key=self._make_sort_key_function(clock.monotonic()))
            self._waiting.remove(claim)
            self._running.add(claim)
            claim.started_at = clock.monotonic()
            claim.grant_future.set_result(None)

    def _make_sort_key_function(self, now: float) -> Callable[[WorkerSlotClaim], tuple[float, float, float]]:
        tenants, kinds = self._seconds_by_tenant.copy(), self._seconds_by_class.copy()
        for running in self._running:
            tenant, kind = running.tenant_and_class_keys
            seconds = (now - running.started_at) / running.tenant.weight
            tenants[tenant] += seconds
            kinds[kind] += seconds
        return lambda claim: (
            tenants[claim.tenant_and_class_keys[0]],
            kinds[claim.tenant_and_class_keys[1]],
            claim.virtual_arrival,
        )
