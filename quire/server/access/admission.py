"""Decides whether a call is admitted: whether the server is open, the queue has room, and the key's limits allow it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.engine.errors import InvalidRequest, Overloaded
from quire.engine.link.client import EngineClient
from quire.server.access.authentication import tenant_of
from quire.server.access.rate_limits import Reservation
from quire.server.access.tenants import Tenant
from quire.server.budget import Budget
from quire.server.config import ServerConfig

SHUTTING_DOWN = "The server is shutting down"
ASLEEP = "The model sleeps and takes no requests: POST /wake_up wakes it"
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens", "shutting_down", "asleep")
"""Reasons for a 503; the first two have vLLM's names."""


class Admitted:
    """A call that was admitted, until it is settled."""

    def __init__(self, reservation: Reservation, tokens: Budget, tenant: str, prompt_tokens: int) -> None:
        self._reservation = reservation
        self._tokens = tokens
        self._tenant = tenant
        self._prompt_tokens = prompt_tokens
        tokens.take(tenant, prompt_tokens)

    def settle(self, used: int) -> None:
        """As Reservation.settle; the prompts are not needed any more."""
        self._reservation.settle(used)
        self._tokens.take(self._tenant, -self._prompt_tokens)
        self._prompt_tokens = 0


class Admission:
    """Admits generations as long as the queue has room for them.

    A call is checked twice: `check_open` before its body is read, `admit` when its prompts are known.
    """

    def __init__(self, client: EngineClient, config: ServerConfig, context_length: int, *, keyed: bool) -> None:
        """`keyed`: the server asks for API keys, so tenants compete for the queue."""
        self.draining = False
        """Whether the server is about to end, and takes no new generations."""
        self.rejections = dict.fromkeys(REJECTIONS, 0)
        """How many calls were answered 503, by reason."""
        self._client = client
        self._config = config
        self._keyed = keyed
        self._tokens = Budget(config.max_queued_tokens + config.most_running * context_length)
        """Prompt tokens of calls that are not settled: as many as may wait and run. Those whose clients do not read
        hold theirs when the engine is done with them."""

    def drain(self) -> None:
        """Refuse all new generations from now on."""
        self.draining = True

    def check_open(self, tenant: Tenant) -> None:
        """Refuse what no body could make acceptable: an overloaded server should not read it. Raises Overloaded."""
        if self.draining:
            raise self._rejected("shutting_down", SHUTTING_DOWN)
        if self._client.refusing:
            raise self._rejected("asleep", ASLEEP)
        self._check_room(tenant, requests=1, tokens=1)

    def admit(
        self, tenant: Tenant, *, prompts: int, prompt_tokens: int, n: int, max_tokens: int | None, priority: int
    ) -> Admitted:
        """Reserve tokens for n answers to each of `prompts` prompts, which have `prompt_tokens` tokens in total.

        Settle it when the answers have ended. Raises InvalidRequest for a priority that the tenant may
        not have and for more answers than can ever be queued, Overloaded when the queue is full, RateLimited.
        """
        tenant.check_priority(priority)
        queued = self._config.max_queued_requests
        answers, most = prompts * n, self._config.most_running + ((queued + 1) // 2 if self._keyed else queued)
        if answers > most:
            param = "prompt" if prompts > 1 else "n"
            raise InvalidRequest(f"{prompts} prompts with n {n} are more than {most} answers", param=param)
        self._check_room(tenant, requests=answers, tokens=prompt_tokens * n)
        if self._tokens.held and not self._tokens.fits(tenant.name if self._keyed else "", prompt_tokens):
            message = f"Too many prompt tokens are held already ({self._tokens.held}). Please try again later"
            raise self._rejected("max_num_queued_tokens", message)
        reservation = tenant.limits.reserve(prompt_tokens + answers * (max_tokens or 0))
        return Admitted(reservation, self._tokens, tenant.name, prompt_tokens)

    def _check_room(self, tenant: Tenant, *, requests: int, tokens: int) -> None:
        """Raises Overloaded when the queue has no room for this many more requests and prompt tokens.

        Where keys are asked for, a tenant's share of the queue may not exceed the room that it leaves to others
        (Choudhury and Hahne, 1998, "Dynamic Queue Length Thresholds"); otherwise one tenant could lock out all others.
        """
        client, config = self._client, self._config
        waiting = max(0, client.num_open + requests - config.most_running)
        room = config.max_queued_requests - waiting
        mine = min(waiting, client.num_open_of(tenant.name) + requests)
        if room < 0 or (self._keyed and mine > room + 1):
            message = f"Too many requests wait already ({client.num_open} are open). Please try again later"
            raise self._rejected("max_num_queued_reqs", message)
        queued = client.queued_tokens
        room = config.max_queued_tokens - queued - tokens
        mine = min(queued, self._tokens.held_of(tenant.name)) if self._keyed else 0
        if queued and mine > room:
            message = f"Too many prompt tokens wait already ({queued} of {config.max_queued_tokens})"
            raise self._rejected("max_num_queued_tokens", f"{message}. Please try again later")

    def _rejected(self, reason: str, message: str) -> Overloaded:
        self.rejections[reason] += 1
        return Overloaded(message)


def admission_of(request: Request) -> Admission:
    admission = request.scope["runtime"].admission
    assert isinstance(admission, Admission)
    return admission


class ModelRoute(APIRoute):
    """A route that needs a model, which the request names in its body, in its path, or in the query parameter `model`.

    `handle` is overridden, not only the handler that it calls, because the request needs its model until the last byte
    of the answer is sent.
    """

    awake: ClassVar[bool] = True
    """Whether requests need the model's engine."""
    named: ClassVar[bool] = True
    """Whether requests name their model; else any one that is loaded will do."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        give = scope["app"].state.server.models.give
        await give(super().handle, scope, receive, send, awake=self.awake, named=self.named)


class IdleRoute(ModelRoute):
    """A route that needs no running engine, or wakes the engine itself."""

    awake = False


class CountedRoute(IdleRoute):
    """Counts a call against its key's requests per minute before the body is read. Answers report the key's limits in
    x-ratelimit headers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def counted(request: Request) -> Response:
            self.check(request)
            limits = tenant_of(request.scope).limits
            limits.count_request()
            response = await handle(request)
            response.headers.update(limits.headers())
            return response

        return counted

    def check(self, request: Request) -> None:
        """Raise the error that refuses a call whatever its body says."""


class StoredRoute(CountedRoute):
    """A counted route for data of the whole server, whichever model made it."""

    named = False


class FileRoute(CountedRoute):
    """A counted route that needs no model."""

    handle = APIRoute.handle


class GenerationRoute(CountedRoute):
    """A counted route whose calls need room in the engine's queue."""

    awake = True

    def check(self, request: Request) -> None:
        admission_of(request).check_open(tenant_of(request.scope))
