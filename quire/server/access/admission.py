"""Decides whether a call is admitted: whether the server is open, the queue has room, and the key's limits allow it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.engine.client.engine_client import EngineClient
from quire.engine.common.errors import InvalidRequest, Overloaded
from quire.server.access.authentication import tenant_of
from quire.server.access.rate_limits import TokenReservation
from quire.server.access.tenants import Tenant
from quire.server.config import ServerConfig
from quire.server.shared_capacity import SharedCapacity

SHUTTING_DOWN_MESSAGE = "The server is shutting down"
ASLEEP_MESSAGE = "The model sleeps and takes no requests: POST /wake_up wakes it"
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens", "shutting_down", "asleep")
"""Reasons for a 503; the first two have vLLM's names."""


class AdmissionTicket:
    """A call that was admitted, until it is settled."""

    def __init__(
        self, reservation: TokenReservation, token_budget: SharedCapacity, tenant: str, prompt_tokens: int
    ) -> None:
        self._reservation = reservation
        self._token_budget = token_budget
        self._tenant = tenant
        self._prompt_tokens = prompt_tokens
        token_budget.adjust_held_amount(tenant, prompt_tokens)

    def settle_usage(self, used_tokens: int) -> None:
        """As TokenReservation.settle_usage; the prompts are not needed any more."""
        self._reservation.settle_usage(used_tokens)
        self._token_budget.adjust_held_amount(self._tenant, -self._prompt_tokens)
        self._prompt_tokens = 0


class Admission:
    """Admits generations as long as the queue has room for them.

    A call is checked twice: `check_availability` before its body is read, `admit_generation` when its prompts are
    known."""

    def __init__(self, client: EngineClient, config: ServerConfig, context_length: int, *, has_api_keys: bool) -> None:
        """`has_api_keys`: the server asks for API keys, so tenants compete for the queue."""
        self.is_draining = False
        """Whether the server is about to end, and takes no new generations."""
        self.rejections = dict.fromkeys(REJECTION_REASONS, 0)
        """How many calls were answered 503, by reason."""
        self._client = client
        self._config = config
        self._has_api_keys = has_api_keys
        self._token_budget = SharedCapacity(config.max_queued_tokens + config.max_running_requests * context_length)
        """Prompt tokens of calls that are not settled: as many as may wait and run. Those whose clients do not read
        hold theirs when the engine is done with them."""

    def start_draining(self) -> None:
        """Refuse all new generations from now on."""
        self.is_draining = True

    def check_availability(self, tenant: Tenant) -> None:
        """Refuse what no body could make acceptable: an overloaded server should not read it. Raises Overloaded."""
        if self.is_draining:
            raise self._make_counted_error("shutting_down", SHUTTING_DOWN_MESSAGE)
        if self._client.refusing:
            raise self._make_counted_error("asleep", ASLEEP_MESSAGE)
        self._check_queue_room(tenant, requests=1, tokens=1)

    def admit_generation(
        self, tenant: Tenant, *, num_prompts: int, prompt_tokens: int, n: int, max_tokens: int | None, priority: int
    ) -> AdmissionTicket:
        """Reserve tokens for n answers to each of `num_prompts` prompts, which have `prompt_tokens` tokens in total.

        Settle it when the answers have ended. Raises InvalidRequest for a priority that the tenant may
        not have and for more answers than can ever be queued, Overloaded when the queue is full, RateLimited.
        """
        tenant.require_allowed_priority(priority)
        queued = self._config.max_queued_requests
        num_answers, max_answers = (
            num_prompts * n,
            self._config.max_running_requests + ((queued + 1) // 2 if self._has_api_keys else queued),
        )
        if num_answers > max_answers:
            param = "prompt" if num_prompts > 1 else "n"
            raise InvalidRequest(f"{num_prompts} prompts with n {n} are more than {max_answers} answers", param=param)
        self._check_queue_room(tenant, requests=num_answers, tokens=prompt_tokens * n)
        if self._token_budget.total_used and not self._token_budget.has_room(
            tenant.name if self._has_api_keys else "", prompt_tokens
        ):
            message = (
                f"Too many prompt tokens are held already ({self._token_budget.total_used}). Please try again later"
            )
            raise self._make_counted_error("max_num_queued_tokens", message)
        reservation = tenant.limits.reserve_tokens(prompt_tokens + num_answers * (max_tokens or 0))
        return AdmissionTicket(reservation, self._token_budget, tenant.name, prompt_tokens)

    def _check_queue_room(self, tenant: Tenant, *, requests: int, tokens: int) -> None:
        """Raises Overloaded when the queue has no room for this many more requests and prompt tokens.

        Where keys are asked for, a tenant's share of the queue may not exceed the room that it leaves to others
        (Choudhury and Hahne, 1998, "Dynamic Queue Length Thresholds"); otherwise one tenant could lock out all others.
        """
        client, config = self._client, self._config
        waiting = max(0, client.num_open + requests - config.max_running_requests)
        room = config.max_queued_requests - waiting
        mine = min(waiting, client.num_open_of(tenant.name) + requests)
        if room < 0 or (self._has_api_keys and mine > room + 1):
            message = f"Too many requests wait already ({client.num_open} are open). Please try again later"
            raise self._make_counted_error("max_num_queued_reqs", message)
        queued = client.queued_tokens
        room = config.max_queued_tokens - queued - tokens
        mine = min(queued, self._token_budget.used_by_owner(tenant.name)) if self._has_api_keys else 0
        if queued and mine > room:
            message = f"Too many prompt tokens wait already ({queued} of {config.max_queued_tokens})"
            raise self._make_counted_error("max_num_queued_tokens", f"{message}. Please try again later")

    def _make_counted_error(self, reason: str, message: str) -> Overloaded:
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

    needs_awake: ClassVar[bool] = True
    """Whether requests need the model's engine."""
    names_model: ClassVar[bool] = True
    """Whether requests name their model; else any one that is loaded will do."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        dispatch = scope["app"].state.server.models.dispatch_request
        await dispatch(super().handle, scope, receive, send, needs_awake=self.needs_awake, names_model=self.names_model)


class EngineOptionalRoute(ModelRoute):
    """A route that needs no running engine, or wakes the engine itself."""

    needs_awake = False


class RateLimitedRoute(EngineOptionalRoute):
    """Counts a call against its key's requests per minute before the body is read. Answers report the key's limits in
    x-ratelimit headers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_rate_limited(request: Request) -> Response:
            self.check_admission_before_body_read(request)
            limits = tenant_of(request.scope).limits
            limits.count_request()
            response = await handle(request)
            response.headers.update(limits.ratelimit_headers())
            return response

        return handle_rate_limited

    def check_admission_before_body_read(self, request: Request) -> None:
        """Raise the error that refuses a call whatever its body says."""


class StoredDataRoute(RateLimitedRoute):
    """A counted route for data of the whole server, whichever model made it."""

    names_model = False


class ModelIndependentRoute(RateLimitedRoute):
    """A counted route that needs no model."""

    handle = APIRoute.handle


class GenerationRoute(RateLimitedRoute):
    """A counted route whose calls need room in the engine's queue."""

    needs_awake = True

    def check_admission_before_body_read(self, request: Request) -> None:
        admission_of(request).check_availability(tenant_of(request.scope))
