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

from quire.engine.core.request import Request
from quire.engine.types import EngineCoreRequest

MAX_TENANTS = 4096
"""Whose counters are remembered; gateways tell tenants' names, ever new ones. Of more the least served half that does
not wait is forgotten: most of these would be raised to the smallest counter anyway, when they wait again."""
OUTPUT_COST = 2
"""How many prompt tokens a generated token counts as; the paper's value."""


BEHIND = 16
"""Tokens that what is less urgent gets of a step at least."""
LATELY, SHORT = 200, 64
"""For so many steps after the last one with something more urgent, steps have so many tokens at most: more of it may
come, and would wait for the step that is under way. Where more sequences run than that, a token of each and BEHIND."""


class TokenBudget:
    """The tokens of a step. While something more urgent runs or waits, what is less urgent gets as many as that
    generates, and at least BEHIND: it goes on, and costs the others little of their time. Of a step with a prompt that
    is more urgent it gets no more than that: somebody waits for its first token."""

    def __init__(self, tokens: int, running: Sequence[Request], first: Request | None) -> None:
        """`first`: of those that wait."""
        self.left = tokens
        known = running if first is None else (*running, first)
        self.urgency = min((request.engine_request.priority for request in known), default=0)
        self._urgent = self._behind = 0

    def max_tokens(self, request: Request) -> int:
        """How many tokens a sequence may compute."""
        if request.engine_request.priority <= self.urgency:
            return self.left
        return min(self.left, max(BEHIND, self._urgent) - self._behind)

    def take(self, request: Request, count: int) -> None:
        """A negative count gives back."""
        self.left -= count
        if request.engine_request.priority <= self.urgency:
            self._urgent += count if request.num_output_tokens else 0
        else:
            self._behind += count


class FairQueue:
    """The waiting sequences in order. It knows no clock, no pages and no steps."""

    def __init__(self) -> None:
        self._urgency = self._steps = 0
        """What was the most urgent lately, and after how many steps without it that is forgotten."""
        self._served: dict[str, float] = {}
        """Virtual token counters, by tenant."""
        self._lines: dict[tuple[int, str], list[Request]] = {}
        """By (priority, tenant): the waiting sequences in the order of their places. Empty lists are removed."""
        self._last_left = 0.0
        """The counter of the tenant that stopped waiting last; a tenant starts from it when nobody else waits."""

    def budget(self, tokens: int, running: Sequence[Request], *, whole: bool) -> TokenBudget:
        """Of the next step. `whole`: prompts are never cut, so it cannot be short."""
        budget = TokenBudget(tokens, running, self.peek())
        if budget.urgency <= self._urgency or not self._steps:
            self._urgency, self._steps = budget.urgency, LATELY
        else:
            self._steps -= 1
            budget.left = tokens if whole else min(tokens, max(SHORT, len(running) + BEHIND))
        return budget

    def sort_key(self, request: Request) -> tuple[int, float, tuple[float, int]]:
        """The smallest goes first; among running sequences the largest is preempted first."""
        return (
            request.engine_request.priority,
            self._served.get(request.engine_request.tenant, self._last_left),
            request.sort_key,
        )

    def push(self, request: Request) -> None:
        tenant = request.engine_request.tenant
        if not self._waits(tenant):
            lowest = min((self._served[other] for _, other in self._lines), default=self._last_left)
            self._served[tenant] = max(self._served.get(tenant, 0.0), lowest)
        insort(self._lines.setdefault((request.engine_request.priority, tenant), []), request, key=_place)
        self._forget()

    def peek(self) -> Request | None:
        """The sequence to go next."""
        return min((line[0] for line in self._lines.values()), key=self.sort_key, default=None)

    def remove(self, request: Request) -> None:
        """Take a waiting sequence out."""
        tenant = request.engine_request.tenant
        key = (request.engine_request.priority, tenant)
        line = self._lines[key]
        index = bisect_left(line, request.sort_key, key=_place)
        assert line[index] is request, "it does not wait"
        del line[index]
        if not line:
            del self._lines[key]
            if not self._waits(tenant):
                self._last_left = self._served[tenant]

    def preemption_candidates(self, first: Request, running: Sequence[Request]) -> list[Request]:
        """The running sequences that may be preempted for `first`, which goes next, in the order to preempt them.

        They are less urgent; or they come after it in rank, and their tenant still runs at least as many for its weight
        without them as its own tenant does with it. So each preemption makes the shares of the most urgent more equal,
        and none is answered by one back.
        """
        tenant, urgency, rank = first.engine_request.tenant, first.engine_request.priority, self.sort_key(first)
        held = Counter(engine_request.engine_request.tenant for engine_request in running)
        if (
            len(held) == 1
            and tenant in held
            and all(engine_request.engine_request.priority <= urgency for engine_request in running)
        ):
            return []
        share = (held[tenant] + 1) / first.engine_request.weight
        found = []
        for request in sorted(running, key=self.sort_key, reverse=True):
            other, less_urgent = request.engine_request.tenant, request.engine_request.priority > urgency
            beyond = other != tenant and (held[other] - 1) / request.engine_request.weight >= share
            if less_urgent or (beyond and rank < self.sort_key(request)):
                held[other] -= 1
                found.append(request)
        return found

    def adapter_slot(self, request: Request) -> int:
        """The slot of the adapter of a sequence that may go next; 0: it needs none."""
        assert request.engine_request.adapter is None, "an adapter, and nothing that loads any"
        return 0

    def on_finished(self, request: Request) -> None:
        """The sequence has ended; it does not wait."""

    def take_adapter_loads(self) -> list[tuple[str, float]]:
        """See SchedulerOutput.adapter_loads; since the last call."""
        return []

    def advance(self) -> Sequence[tuple[Request, str]]:
        """Let those go next that waited for something that has come. Returns those for which it cannot come, with why:
        they still wait, and must be removed."""
        return ()

    def wait(self) -> None:
        """Wait a little for what sequences wait for, as there is nothing to compute."""

    def charge(self, request: EngineCoreRequest, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Count tokens that were computed for the request's tenant."""
        served = self._served.get(request.tenant, self._last_left)
        self._served[request.tenant] = served + (prompt_tokens + OUTPUT_COST * output_tokens) / request.weight

    def _forget(self) -> None:
        if len(self._served) > MAX_TENANTS:
            waiting = {tenant for _, tenant in self._lines}
            idle = sorted(self._served.keys() - waiting, key=lambda tenant: self._served[tenant])
            for tenant in idle[: len(idle) // 2]:
                del self._served[tenant]

    def _waits(self, tenant: str) -> bool:
        return any(other == tenant for _, other in self._lines)


def _place(request: Request) -> tuple[float, int]:
    return request.sort_key
