"""Fourth station: determines the caller, what its headers ask for, and the answer's id. server/access/authentication.py
has already checked the API key before the body was read.
"""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request

from quire.engine.common import clock, random_source
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.types import Adapter
from quire.server.access.authentication import tenant_of
from quire.server.access.gateway_headers import PRIORITY_SCOPE_KEY
from quire.server.durability.answer_pins import ComputeIdentity
from quire.server.durability.durable_request import DurableRequest, make_durable_request
from quire.server.generation.resolved_request import AnswerIdentity, Caller, GenerationRequest, ResolvedRequest
from quire.server.observe.request_log import REQUEST_ID_HEADER, is_safe_id
from quire.server.runtime.server_context import get_runtime, get_server_context
from quire.server.served_model import get_model

AnyRequest = TypeVar("AnyRequest", bound=ResolvedRequest)

RECEIPT_HEADER = "X-Receipt"


def authorize(request: Request, resolved: AnyRequest) -> AnyRequest:
    """Raises ModelNotFound if the adapter was unloaded meanwhile, and InvalidRequest if the requested receipt is not
    available.
    """
    tenant = tenant_of(request.scope)
    gateways, priority = get_server_context(request).gateways, request.scope.get(PRIORITY_SCOPE_KEY)
    if priority is None and gateways.trusts_any:
        priority = gateways.resolve_priority(request.scope)
    header_id = request.headers.get(REQUEST_ID_HEADER)
    adapter = _find_adapter(request, resolved.model)
    include_receipt = record_receipt = False
    if isinstance(resolved, GenerationRequest) and resolved.allows_receipt:
        include_receipt = _includes_receipt(request, resolved)
        record_receipt = include_receipt or get_runtime(request).receipt_writer.receipt_log is not None
    caller = Caller(
        tenant=tenant.name,
        weight=tenant.weight,
        priority=resolved.body_priority if priority is None else priority,
        cache_salt=tenant.prefix_cache_salt(resolved.body_cache_salt),
        adapter=adapter,
        chosen_id=f"{resolved.id_prefix}{header_id}" if is_safe_id(header_id) else "",
        include_receipt=include_receipt,
        record_receipt=record_receipt,
    )
    return resolved.with_caller(caller)


def identify(resolved: ResolvedRequest) -> AnswerIdentity:
    """`requested_id` comes from the body's request_id or X-Request-Id, but is empty for stored responses."""
    chosen_id = resolved.body_id or resolved.authorized_caller.chosen_id
    seed = None
    if isinstance(resolved, GenerationRequest):
        seed = resolved.params.seed
        if resolved.responses_fields is not None and resolved.responses_fields.store:
            chosen_id = ""  # a stored id must be unique, and callers may reuse ids
    return AnswerIdentity(
        id=f"{resolved.id_prefix}{random_source.token_hex(16)}",
        requested_id=chosen_id,
        created=int(clock.time()),
        seed=seed,
    )


def open_durable_request(request: Request) -> DurableRequest:
    server, runtime = get_server_context(request), get_runtime(request)

    def describe_compute() -> ComputeIdentity:
        return runtime.describe_compute(get_model(request).fingerprint)

    return make_durable_request(request, server.resumable_calls, server.background, describe_compute, runtime.config)


def _includes_receipt(request: Request, resolved: GenerationRequest) -> bool:
    is_asked_for = request.headers.get(RECEIPT_HEADER, "").lower() in ("1", "true")
    if is_asked_for and (resolved.beam_search or request.scope["path"].startswith("/api/")):
        what = "use_beam_search" if resolved.beam_search else "Ollama's API"
        raise InvalidRequest(f"{RECEIPT_HEADER} is not available with {what}", param=RECEIPT_HEADER)
    return resolved.body_receipt or is_asked_for


def _find_adapter(request: Request, model_name: str) -> Adapter | None:
    adapters, model = get_runtime(request).adapter_registry, get_model(request)
    if adapters is None or model_name in model.names:
        return None
    return adapters.find_adapter(model.resolve_model_name(model_name))
