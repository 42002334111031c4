"""Which waiting sequence goes next: priorities first, then tenants by how much each was served, then their places: who
came first, unless a scheduler of a user's own says otherwise.

Virtual token counters (Sheng et al., 2024, "Fairness in Serving Large Language Models"): a tenant's counter grows by
the tokens computed for it, divided by its weight, and the waiting tenant with the smallest counter goes next. A tenant
that starts to wait is raised to at least the smallest counter of those that wait: idle time earns no credit.

The paper preempts nobody, so long answers of one tenant could keep all places for minutes. Here a tenant that holds
more places than another one's next sequence would give that one must let its newest ones wait, and so must whatever is
less urgent than what waits: see `preemption_candidates`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence

from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.request import Request

MAX_TENANTS = 4096
"""Whose counters are remembered; gateways tell tenants' names, ever new ones. Of more the least served half that does
not wait is forgotten: most of these would be raised to the smallest counter anyway, when they wait again."""
OUTPUT_TOKEN_COST = 2
"""How many prompt tokens a generated token counts as; the paper's value."""


MIN_LOW_PRIORITY_TOKENS = 16
"""Tokens that what is less urgent gets of a step at least."""
URGENT_MEMORY_STEPS, SHORT_STEP_TOKENS = 200, 64
"""For so many steps after the last one with something more urgent, steps have so many tokens at most: more of it may
come, and would wait for the step that is under way. Where more sequences run than that, a token of each and BEHIND."""


class TokenBudget:
    """The tokens of a step. While something more urgent runs or waits, what is less urgent gets as many as that
    generates, and at least BEHIND: it goes on, and costs the others little of their time. Of a step with a prompt that
    is more urgent it gets no more than that: somebody waits for its first token."""

    def __init__(self, tokens: int, running: Sequence[Request], next_waiting: Request | None) -> None:
        """`next_waiting`: of those that wait."""
        self.remaining = tokens
        candidates = running if next_waiting is None else (*running, next_waiting)
        self.urgency = min((request.engine_request.priority for request in candidates), default=0)
        self._urgent_tokens = self._low_priority_tokens = 0

    def max_tokens(self, request: Request) -> int:
        """How many tokens a sequence may compute."""
        if request.engine_request.priority <= self.urgency:
            return self.remaining
        return min(self.remaining, max(MIN_LOW_PRIORITY_TOKENS, self._urgent_tokens) - self._low_priority_tokens)

    def spend(self, request: Request, count: int) -> None:
        """A negative count gives back."""
        self.remaining -= count
        if request.engine_request.priority <= self.urgency:
            self._urgent_tokens += count if request.num_output_tokens else 0
        else:
            self._low_priority_tokens += count


class FairQueue:
    """The waiting sequences in order. It knows no clock, no pages and no steps."""

    def __init__(self) -> None:
        self._urgency = self._short_steps_left = 0
        """What was the most urgent lately, and after how many steps without it that is forgotten."""
        self._served: dict[str, float] = {}
        """Virtual token counters, by tenant."""
        self._queues: dict[tuple[int, str], list[Request]] = {}
        """By (priority, tenant): the waiting sequences in the order of their places. Empty lists are removed."""
        self._last_served = 0.0
        """The counter of the tenant that stopped waiting last; a tenant starts from it when nobody else waits."""

    def make_step_budget(self, tokens: int, running: Sequence[Request], *, whole_prompts: bool) -> TokenBudget:
        """Of the next step. `whole_prompts`: prompts are never cut, so it cannot be short."""
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
        """The smallest goes first; among running sequences the largest is preempted first."""
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
        """The sequence to go next."""
        return min((queue[0] for queue in self._queues.values()), key=self.sort_key, default=None)

    def remove_request(self, request: Request) -> None:
        """Take a waiting sequence out."""
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
        """The running sequences that may be preempted for `waiting_request`, which goes next, in the order to preempt
        them.

        They are less urgent; or they come after it in rank, and their tenant still runs at least as many for its weight
        without them as its own tenant does with it. So each preemption makes the shares of the most urgent more equal,
        and none is answered by one back.
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
        """The slot of the adapter of a sequence that may go next; 0: it needs none."""
        assert request.engine_request.adapter is None, "an adapter, and nothing that loads any"
        return 0

    def release_adapter(self, request: Request) -> None:
        """The sequence has ended; it does not wait."""

    def take_adapter_load_times(self) -> list[tuple[str, float]]:
        """See SchedulerOutput.adapter_loads; since the last call."""
        return []

    def process_adapter_loads(self) -> Sequence[tuple[Request, str]]:
        """Let those go next that waited for something that has come. Returns those for which it cannot come, with why:
        they still wait, and must be removed."""
        return ()

    def wait_for_loads(self) -> None:
        """Wait a little for what sequences wait for, as there is nothing to compute."""

    def charge(self, request: EngineCoreRequest, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Count tokens that were computed for the request's tenant."""
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
