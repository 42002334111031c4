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
ASLEEP_MESSAGE = "The model is asleep and takes no requests: POST /wake_up wakes it"
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens", "shutting_down", "asleep")
"""vLLM uses the first two names."""


class AdmissionTicket:
    def __init__(
        self, reservation: TokenReservation | None, token_budget: SharedCapacity, tenant: str, prompt_tokens: int
    ) -> None:
        self._reservation = reservation
        self._token_budget = token_budget
        self._tenant = tenant
        self._prompt_tokens = prompt_tokens
        token_budget.adjust_held_amount(tenant, prompt_tokens)

    def settle_usage(self, used_tokens: int) -> None:
        """Only the first call has an effect."""
        if self._reservation is not None:
            self._reservation.settle_usage(used_tokens)
        self._token_budget.adjust_held_amount(self._tenant, -self._prompt_tokens)
        self._prompt_tokens = 0


class Admission:
    def __init__(self, client: EngineClient, config: ServerConfig, context_length: int, *, has_api_keys: bool) -> None:
        self.is_draining = False
        self.rejections = dict.fromkeys(REJECTION_REASONS, 0)
        self._client = client
        self._config = config
        self._max_running_requests = config.max_running_requests
        self._has_api_keys = has_api_keys
        self._token_budget = SharedCapacity(config.max_queued_tokens + self._max_running_requests * context_length)
        """Bounds the prompt tokens of calls whose tickets are not settled. If a client reads slowly, its call stays
        unsettled after the engine is done with it.
        """

    def start_draining(self) -> None:
        self.is_draining = True

    def check_availability(self, tenant: Tenant) -> None:
        """Raises Overloaded. Call this before the body is read, to spare an overloaded server."""
        if self.is_draining:
            raise self._make_counted_error("shutting_down", SHUTTING_DOWN_MESSAGE)
        if self._client.refusing:
            raise self._make_counted_error("asleep", ASLEEP_MESSAGE)
        self._check_queue_room(tenant, requests=1, tokens=1)

    def admit_generation(
        self, tenant: Tenant, *, num_prompts: int, prompt_tokens: int, n: int, max_tokens: int | None, priority: int
    ) -> AdmissionTicket:
        """`prompt_tokens` is the sum over the prompts. The caller must settle the ticket when the answers have ended.
        Raises Overloaded, RateLimited, and InvalidRequest for a forbidden priority or for more answers than can ever
        run and wait at once.
        """
        tenant.require_allowed_priority(priority)
        queued = self._config.max_queued_requests
        num_answers, max_answers = (
            num_prompts * n,
            self._max_running_requests + ((queued + 1) // 2 if self._has_api_keys else queued),
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
        reservation = None
        if tenant.limits.has_limits:
            reservation = tenant.limits.reserve_tokens(prompt_tokens + num_answers * (max_tokens or 0))
        return AdmissionTicket(reservation, self._token_budget, tenant.name, prompt_tokens)

    def _check_queue_room(self, tenant: Tenant, *, requests: int, tokens: int) -> None:
        """With API keys, a tenant may not use more of the queue than it leaves free to others (Choudhury and Hahne,
        1998, "Dynamic Queue Length Thresholds"), so it cannot lock them out.
        """
        client, config = self._client, self._config
        waiting = max(0, client.num_open + requests - self._max_running_requests)
        room = config.max_queued_requests - waiting
        mine = min(waiting, client.num_open_of(tenant.name) + requests)
        if room < 0 or (self._has_api_keys and mine > room + 1):
            message = f"Too many requests are waiting already ({client.num_open} are open). Please try again later"
            raise self._make_counted_error("max_num_queued_reqs", message)
        queued = client.queued_tokens
        room = config.max_queued_tokens - queued - tokens
        mine = min(queued, self._token_budget.used_by_owner(tenant.name)) if self._has_api_keys else 0
        if queued and mine > room:
            message = f"Too many prompt tokens are waiting already ({queued} of {config.max_queued_tokens})"
            raise self._make_counted_error("max_num_queued_tokens", f"{message}. Please try again later")

    def _make_counted_error(self, reason: str, message: str) -> Overloaded:
        self.rejections[reason] += 1
        return Overloaded(message)


def admission_of(request: Request) -> Admission:
    admission = request.scope["runtime"].admission
    assert isinstance(admission, Admission)
    return admission


class ModelRoute(APIRoute):
    """A route for the model that the body, path or query parameter `model` names. `handle` waits until the model is
    loaded. If `needs_awake`, it also keeps the model awake until the last byte of a POST's answer is sent.
    """

    needs_awake: ClassVar[bool] = True
    names_model: ClassVar[bool] = True
    """If False, any loaded model serves the request."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        dispatch = scope["app"].state.server.models.dispatch_request
        await dispatch(super().handle, scope, receive, send, needs_awake=self.needs_awake, names_model=self.names_model)


class EngineOptionalRoute(ModelRoute):
    """A route that needs no awake engine, or that wakes the engine itself."""

    needs_awake = False


class RateLimitedRoute(EngineOptionalRoute):
    """Counts each request for the rate limits before its body is read."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_rate_limited(request: Request) -> Response:
            self.check_admission_before_body_read(request)
            limits = tenant_of(request.scope).limits
            if limits.has_limits:
                limits.count_request()
            response = await handle(request)
            if limits.has_limits:
                response.headers.update(limits.ratelimit_headers())
            return response

        return handle_rate_limited

    def check_admission_before_body_read(self, request: Request) -> None:
        """Subclasses raise the errors that do not depend on the body."""


class StoredDataRoute(RateLimitedRoute):
    names_model = False


class ModelIndependentRoute(RateLimitedRoute):
    handle = APIRoute.handle


class GenerationRoute(RateLimitedRoute):
    needs_awake = True

    def check_admission_before_body_read(self, request: Request) -> None:
        admission_of(request).check_availability(tenant_of(request.scope))
