"""The waiting queue, ordered by priority, then by fairness between tenants, then by sort key.

Fairness uses virtual token counters (Sheng et al., 2024, "Fairness in Serving Large Language Models"): a tenant's
counter grows by its computed tokens divided by its weight, and the waiting tenant with the smallest counter goes next.
When a tenant starts to wait, its counter is raised to the smallest one of the waiting tenants, so idle time earns no
credit. Unlike the paper, Quire preempts, because one tenant's long answers could otherwise occupy all slots for
minutes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence

from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.request import Request

MAX_TENANTS = 4096
"""Gateways may send new tenant names without end."""
OUTPUT_TOKEN_COST = 2
"""Cost of an output token in prompt tokens, as in the paper."""


MIN_LOW_PRIORITY_TOKENS = 16
URGENT_MEMORY_STEPS, SHORT_STEP_TOKENS = 200, 64
"""For URGENT_MEMORY_STEPS steps after the last urgent request, a step has about SHORT_STEP_TOKENS tokens, so that the
next urgent request need not wait for a long step.
"""


class TokenBudget:
    """Requests with the lowest priority number are urgent. While they run or wait, all others together get as many
    tokens as the urgent ones generate, but at least MIN_LOW_PRIORITY_TOKENS. Urgent prompts do not count.
    """

    def __init__(self, tokens: int, running: Sequence[Request], next_waiting: Request | None) -> None:
        self.remaining = tokens
        candidates = running if next_waiting is None else (*running, next_waiting)
        self.urgency = min((request.engine_request.priority for request in candidates), default=0)
        self._urgent_tokens = self._low_priority_tokens = 0

    def max_tokens(self, request: Request) -> int:
        if request.engine_request.priority <= self.urgency:
            return self.remaining
        return min(self.remaining, max(MIN_LOW_PRIORITY_TOKENS, self._urgent_tokens) - self._low_priority_tokens)

    def spend(self, request: Request, count: int) -> None:
        """A negative `count` returns tokens."""
        self.remaining -= count
        if request.engine_request.priority <= self.urgency:
            self._urgent_tokens += count if request.num_output_tokens else 0
        else:
            self._low_priority_tokens += count


class FairQueue:
    def __init__(self) -> None:
        self._urgency = self._short_steps_left = 0
        self._served: dict[str, float] = {}
        self._queues: dict[tuple[int, str], list[Request]] = {}
        """Requests in sort-key order, by (priority, tenant)."""
        self._last_served = 0.0
        """A tenant's counter starts at this value if no other tenant waits."""

    def make_step_budget(self, tokens: int, running: Sequence[Request], *, whole_prompts: bool) -> TokenBudget:
        """With `whole_prompts`, prompts cannot be split, so the step gets all `tokens`."""
        budget = TokenBudget(tokens, running, self.peek())
        if budget.urgency <= self._urgency or not self._short_steps_left:
            self._urgency, self._short_steps_left = budget.urgency, URGENT_MEMORY_STEPS
        else:
            self._short_steps_left -= 1
            budget.remaining = (
                tokens if whole_prompts else min(tokens, max(SHORT_STEP_TOKENS, len(running) + MIN_LOW_PRIORITY_TOKENS))
            )
        return budget

    def sort_key(self, request: Request) -> tuple[int, float, tuple[float, int]]:
        """The smallest key is scheduled first, the largest preempted first."""
        return (
            request.engine_request.priority,
            self._served.get(request.engine_request.tenant, self._last_served),
            request.sort_key,
        )

    def push_request(self, request: Request) -> None:
        tenant = request.engine_request.tenant
        if not self._has_waiting(tenant):
            min_served = min(
                (self._served[other_tenant] for _, other_tenant in self._queues), default=self._last_served
            )
            self._served[tenant] = max(self._served.get(tenant, 0.0), min_served)
        insort(self._queues.setdefault((request.engine_request.priority, tenant), []), request, key=_request_sort_key)
        self._evict_tenants()

    def peek(self) -> Request | None:
        return min((queue[0] for queue in self._queues.values()), key=self.sort_key, default=None)

    def remove_request(self, request: Request) -> None:
        tenant = request.engine_request.tenant
        key = (request.engine_request.priority, tenant)
        queue = self._queues[key]
        index = bisect_left(queue, request.sort_key, key=_request_sort_key)
        assert queue[index] is request, "it does not wait"
        del queue[index]
        if not queue:
            del self._queues[key]
            if not self._has_waiting(tenant):
                self._last_served = self._served[tenant]

    def preemption_candidates(self, waiting_request: Request, running: Sequence[Request]) -> list[Request]:
        """Running requests that may be preempted, in order. Each is less urgent, or has a larger sort key and a tenant
        that would still run at least as many requests per weight as the waiting tenant. Therefore a preempted request
        never preempts the one that replaced it.
        """
        tenant = waiting_request.engine_request.tenant
        urgency = waiting_request.engine_request.priority
        waiting_key = self.sort_key(waiting_request)
        num_running = Counter(running_request.engine_request.tenant for running_request in running)
        if (
            len(num_running) == 1
            and tenant in num_running
            and all(running_request.engine_request.priority <= urgency for running_request in running)
        ):
            return []
        share = (num_running[tenant] + 1) / waiting_request.engine_request.weight
        candidates = []
        for request in sorted(running, key=self.sort_key, reverse=True):
            other_tenant, is_less_urgent = request.engine_request.tenant, request.engine_request.priority > urgency
            is_over_share = (
                other_tenant != tenant and (num_running[other_tenant] - 1) / request.engine_request.weight >= share
            )
            if is_less_urgent or (is_over_share and waiting_key < self.sort_key(request)):
                num_running[other_tenant] -= 1
                candidates.append(request)
        return candidates

    def adapter_slot(self, request: Request) -> int:
        """0 if the request needs no adapter."""
        assert request.engine_request.adapter is None, "an adapter, and nothing that loads any"
        return 0

    def release_adapter(self, request: Request) -> None:
        """Called when a request has ended and has left the queue."""

    def take_adapter_load_times(self) -> list[tuple[str, float]]:
        return []

    def process_adapter_loads(self) -> Sequence[tuple[Request, str]]:
        """Return waiting requests whose adapter failed to load, with the reasons. The caller must remove them."""
        return ()

    def wait_for_loads(self) -> None:
        """Called only while there is nothing to compute."""

    def charge(self, request: EngineCoreRequest, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        served = self._served.get(request.tenant, self._last_served)
        self._served[request.tenant] = served + (prompt_tokens + OUTPUT_TOKEN_COST * output_tokens) / request.weight

    def _evict_tenants(self) -> None:
        if len(self._served) > MAX_TENANTS:
            waiting = {tenant for _, tenant in self._queues}
            idle = sorted(self._served.keys() - waiting, key=lambda tenant: self._served[tenant])
            for tenant in idle[: len(idle) // 2]:
                del self._served[tenant]

    def _has_waiting(self, tenant: str) -> bool:
        return any(waiting_tenant == tenant for _, waiting_tenant in self._queues)


def _request_sort_key(request: Request) -> tuple[float, int]:
    return request.sort_key
