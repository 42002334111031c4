"""Whether a generation may come in: its key's rate limits, and the room in the queue."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.errors import InvalidRequest, Overloaded
from quire.server.access.authentication import tenant_of
from quire.server.access.rate_limits import Reservation
from quire.server.access.tenants import Tenant
from quire.server.generation.prompts import Prompt
from quire.server.served_model import Serving, serving_of

SHUTTING_DOWN = "The server is shutting down"


class CountedRoute(APIRoute):
    """Counts a call among its key's requests a minute before the body is read; answers tell the key's limits in
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
        """Raise what a call is to be refused with, whatever its body."""


class GenerationRoute(CountedRoute):
    """A server in overload has better to do than to read what it will refuse."""

    def check(self, request: Request) -> None:
        if serving_of(request).draining.is_set():
            raise Overloaded(SHUTTING_DOWN)
        check_room(serving_of(request), tenant_of(request.scope), requests=1, tokens=1)


def admit(serving: Serving, tenant: Tenant, prompts: Sequence[Prompt], n: int, max_tokens: int | None) -> Reservation:
    """Room for n answers to each prompt. Settle the reservation when they have ended.

    Raises InvalidRequest for more than can ever be queued, Overloaded when the queue is full, RateLimited.
    """
    config = serving.config
    most = config.max_num_seqs + config.max_queued_requests
    if len(prompts) * n > most:
        param = "prompt" if len(prompts) > 1 else "n"
        raise InvalidRequest(f"{len(prompts)} prompts with n {n} are more than {most} answers", param=param)
    tokens = sum(len(prompt.ids) for prompt in prompts)
    check_room(serving, tenant, requests=len(prompts) * n, tokens=tokens * n)
    return tenant.limits.reserve(tokens + len(prompts) * n * (max_tokens or 0))


def check_room(serving: Serving, tenant: Tenant, *, requests: int, tokens: int) -> None:
    """Raises Overloaded when so many more would make the queue longer than it may be.

    Nobody alone fills the queue where keys are asked for: a tenant's part of it may be as long as the room that it
    leaves to others (Choudhury and Hahne, 1998, "Dynamic Queue Length Thresholds"), or the queue of a greedy one would
    lock the others out.
    """
    client, config = serving.client, serving.config
    waiting = max(0, client.num_open + requests - config.max_num_seqs)
    room = config.max_queued_requests - waiting
    mine = min(waiting, client.num_open_of(tenant.name) + requests)
    if room < 0 or (serving.tenants.closed and mine > room + 1):
        raise Overloaded(f"Too many requests wait already ({client.num_open} are open). Please try again later")
    if client.queued_tokens and client.queued_tokens + tokens > config.max_queued_tokens:
        raise Overloaded(
            f"Too many prompt tokens wait already ({client.queued_tokens} of {config.max_queued_tokens}). "
            "Please try again later"
        )
