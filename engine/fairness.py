"""Who waits, and who goes next: priorities first, then tenants by what each was served, then arrival.

Virtual token counters (Sheng et al., 2024, "Fairness in Serving Large Language Models"): a tenant's counter grows by
the tokens computed for it over its weight, and of those who wait the tenant with the smallest goes next. One that comes
with nothing waiting starts no lower than those who wait: idle time earns no credit.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from quire.engine.sequence import Sequence
from quire.engine.types import Request

OUTPUT_COST = 2
"""A generated token counts as so many prompt tokens, as in the paper."""


class FairQueue:
    """The waiting sequences. Pure order: no clock, and nothing is known of pages or steps."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        """Virtual token counters, by tenant."""
        self._lines: dict[tuple[int, str], list[Sequence]] = {}
        """What waits, by priority and tenant, in order of arrival; no line is empty."""
        self._last_left = 0.0
        """The counter of the tenant whose last waiting sequence left last."""

    def rank(self, seq: Sequence) -> tuple[int, float, int]:
        """Smaller goes first; of those that run, the largest is preempted first."""
        return (seq.request.priority, self._served[seq.request.tenant], seq.arrival)

    def push(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        if not self._waits(tenant):
            lowest = min((self._served[other] for _, other in self._lines), default=self._last_left)
            self._served[tenant] = max(self._served.get(tenant, 0.0), lowest)
        insort(self._lines.setdefault((seq.request.priority, tenant), []), seq, key=_arrival)

    def peek(self) -> Sequence | None:
        """The sequence to go next."""
        return min((line[0] for line in self._lines.values()), key=self.rank, default=None)

    def remove(self, seq: Sequence) -> None:
        """It waits, and does so no longer."""
        tenant = seq.request.tenant
        key = (seq.request.priority, tenant)
        line = self._lines[key]
        index = bisect_left(line, seq.arrival, key=_arrival)
        assert line[index] is seq, "it does not wait"
        del line[index]
        if not line:
            del self._lines[key]
            if not self._waits(tenant):
                self._last_left = self._served[tenant]

    def charge(self, request: Request, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Tokens were computed for its tenant."""
        self._served[request.tenant] += (prompt_tokens + OUTPUT_COST * output_tokens) / request.weight

    def _waits(self, tenant: str) -> bool:
        return any(other == tenant for _, other in self._lines)


def _arrival(seq: Sequence) -> int:
    return seq.arrival
