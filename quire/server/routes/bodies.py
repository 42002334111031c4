"""How routes handle the bodies of requests: within limits, and outside the event loop unless they are small."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.types import Adapter
from quire.server.access.authentication import tenant_of
from quire.server.access.body_reader import BodyBuffer
from quire.server.access.memory_lease import grow_request_lease
from quire.server.access.tenants import Tenant
from quire.server.config import ServerConfig
from quire.server.generation.request_specs import GenerationSpec, RequestSpec
from quire.server.images.image_parts import UnfetchedImagesError
from quire.server.observe.request_log import REQUEST_ID_HEADER, is_safe_id
from quire.server.protocol.request_bodies import IGNORED_PARAMS_HEADER, ignored_params_header
from quire.server.resolve.checks import NeedsWorker
from quire.server.resolve.common import Resolved, measured
from quire.server.resolve.parse import BodyType, parse_body_as
from quire.server.resumable_calls import IDEMPOTENCY_HEADER, JOURNAL_BODY_SCOPE_KEY, RESUMABLE_PATHS, RESUMED_SCOPE_KEY
from quire.server.resumption import ComputeIdentity, resume_conflict, with_pinned_fields
from quire.server.runtime.model_runtime import ModelRuntime, get_runtime
from quire.server.runtime.server_context import get_server_context
from quire.server.served_model import ServedModel, get_model
from quire.server.sse import CLIENT_CLOSED_REQUEST, cancel_on_disconnect
from quire.server.store.progress import CallProgress

Result = TypeVar("Result")
Spec = TypeVar("Spec", bound=RequestSpec)
Work = Callable[[bytes, ServedModel, ServerConfig], Result]

WEIGHTS_VERSION = "X-Weights-Version"
"""The header of an answer that names the weights: those of its last token, of a stream those that it began with."""
RECEIPT = "X-Receipt"
"""The header of a request that asks for a receipt, as the field `receipt` of its body does."""
QUICK_BYTES, SMALL_BYTES = 1024, 4096
"""Bodies up to these sizes are worked on here: up to the first many in one turn of the event loop, up to the second,
which takes about a millisecond, one in a turn."""
REFERENCES = "#/components/schemas/{model}"


async def worked_on(request: Request, work: Work[Result]) -> Result:
    """What `work` makes of the request's body.

    What was made of it is held until the request is answered: see server/access/memory_lease.py.

    Raises what BodyReader.hold_request_body, WorkerPool.run_job and MemoryLease.grow_lease raise; HTTPException, which
    nobody will see, when the client has left."""
    keep = get_server_context(request).resumable_calls is not None and request.scope["path"] in RESUMABLE_PATHS
    try:
        async with get_server_context(request).body_reader.hold_request_body(request) as body:
            pieces = tuple(body.chunks) if keep else ()
            made = await _here_or_there(request, body, work)
            if keep:
                grow_request_lease(request.scope, body.received_bytes)
                request.scope[JOURNAL_BODY_SCOPE_KEY] = b"".join(pieces)
            return made
    except ClientDisconnect:
        raise HTTPException(CLIENT_CLOSED_REQUEST) from None


async def parsed(request: Request, body: type[BodyType]) -> BodyType:
    """The request's body as this model. Raises what `worked_on` raises, and InvalidRequest naming the field."""
    return await worked_on(request, partial(parse_body_as, body=body))


async def resolved_spec(request: Request, resolve: Work[Resolved]) -> GenerationSpec:
    """The spec of a generation that the engine can compute, whose answer has the id that its caller chose: the body's
    request_id, or the header X-Request-Id.

    Raises what `worked_on` and GrammarChecker.check_grammars raise.
    """
    return await checked(request, await worked_on(request, resolve))


async def checked(request: Request, call: Resolved) -> GenerationSpec:
    """The same of a call that is resolved."""
    tenant = tenant_of(request.scope)
    if call.grammars:
        holding = get_runtime(request).grammar_checker.with_compilable_grammars(call, tenant, get_model(request))
        call = await cancel_on_disconnect(request.receive, holding)
    spec = replace(of_caller(request, call.spec), grammar_field=call.grammars[-1][0] if call.grammars else None)
    if call.receipts:
        receipt = wants_receipt(request, spec)
        spec = replace(
            spec,
            include_receipt=receipt,
            record_receipt=receipt or get_runtime(request).receipt_writer.receipt_log is not None,
        )
    return await _pinned(request, spec) if JOURNAL_BODY_SCOPE_KEY in request.scope else _without_key(request, spec)


def of_caller(request: Request, spec: Spec) -> Spec:
    """The spec with what the server knows of its caller. Raises ModelNotFound where its adapter has been unloaded."""
    tenant, urgency = tenant_of(request.scope), get_server_context(request).gateways.resolve_priority(request.scope)
    return replace(
        spec,
        requested_id=spec.requested_id or chosen_name(request, spec.id_prefix),
        tenant=tenant.name,
        weight=tenant.weight,
        priority=spec.priority if urgency is None else urgency,
        cache_salt=tenant.prefix_cache_salt(spec.cache_salt),
        adapter=chosen_adapter(request, spec.model),
    )


def _without_key(request: Request, spec: GenerationSpec) -> GenerationSpec:
    """A spec that cannot be asked for again. If the request has an Idempotency-Key, a header of the answer says that it
    has no effect. Raises InvalidRequest instead if the server is strict."""
    if IDEMPOTENCY_HEADER not in request.headers:
        return spec
    before = spec.headers.get(IGNORED_PARAMS_HEADER)
    told = ignored_params_header(["Idempotency-Key"], get_runtime(request).config.strict)
    return replace(
        spec,
        headers={**spec.headers, IGNORED_PARAMS_HEADER: ", ".join(filter(None, (before, told[IGNORED_PARAMS_HEADER])))},
    )


async def _pinned(request: Request, spec: GenerationSpec) -> GenerationSpec:
    """A spec that may be asked for again, or one that is. Raises what ResumableCalls.claim_key_or_resume raises."""
    streams, owner = get_server_context(request).resumable_calls, owner_of(request)
    assert streams is not None
    if (
        spec.responses_fields is not None and spec.responses_fields.conversation_id is not None
    ):  # which is another one the next time
        if IDEMPOTENCY_HEADER in request.headers:
            raise InvalidRequest(
                "Idempotency-Key: not with a conversation, which each answer changes", param=IDEMPOTENCY_HEADER
            )
        del request.scope[JOURNAL_BODY_SCOPE_KEY]
        return spec
    resumed = request.scope.get(RESUMED_SCOPE_KEY)
    if resumed is None:
        resumed = await streams.claim_key_or_resume(
            request, owner, request.scope[JOURNAL_BODY_SCOPE_KEY], stream=spec.stream
        )
        request.scope[RESUMED_SCOPE_KEY] = resumed
    if resumed is not None and (why := resume_conflict(resumed, spec, here_of(request))) is not None:
        if not resumed.call.pins.background:
            raise HTTPException(409, why)
        resumed = replace(resumed, call=msgspec.structs.replace(resumed.call, progress=CallProgress()))
    keyed = IDEMPOTENCY_HEADER in request.headers or (resumed is not None and resumed.call.key is not None)
    return with_pinned_fields(
        spec,
        resumed,
        has_key=keyed,
        is_journaled=get_runtime(request).info.deterministic or streams.has_write_ahead_log,
    )


def wants_receipt(request: Request, spec: GenerationSpec) -> bool:
    """Raises InvalidRequest if the request asks for a receipt that it cannot have."""
    asked = request.headers.get(RECEIPT, "").lower() in ("1", "true")
    if asked and (spec.beam_search or request.scope["path"].startswith("/api/")):
        what = "use_beam_search" if spec.beam_search else "Ollama's API"
        raise InvalidRequest(f"{RECEIPT} is not available with {what}", param=RECEIPT)
    return spec.include_receipt or asked


def here_of(request: Request) -> ComputeIdentity:
    runtime = get_runtime(request)
    info, config = runtime.info, runtime.config
    weights = (
        info.content or info.model,
        info.dtype,
        runtime.client.link.weights_version,
        config.quantization,
        config.quantize_embedding,
    )
    return ComputeIdentity(get_model(request).fingerprint, info.deterministic, repr(weights))


def owner_of(request: Request) -> str:
    """Whose data this is: the digest of the key, because a key's name may be given to another key."""
    return tenant_of(request.scope).digest.hex()


def chosen_adapter(request: Request, name: str) -> Adapter | None:
    """The adapter that a resolved model name stands for; None: the model itself. Raises ModelNotFound where it has been
    unloaded since."""
    adapters, model = get_runtime(request).adapter_registry, get_model(request)
    if adapters is None or name in model.names:
        return None
    return adapters.find_adapter(model.resolve_model_name(name))


def chosen_name(request: Request, prefix: str) -> str:
    """The answer's id by the header X-Request-Id; "" where it has none or none that is safe."""
    header = request.headers.get(REQUEST_ID_HEADER)
    return f"{prefix}{header}" if is_safe_id(header) else ""


async def _here_or_there(request: Request, body: BodyBuffer, work: Work[Result]) -> Result:
    """What `work` makes of a body: small ones are worked on at once, others in a worker."""
    runtime, slow = get_runtime(request), False
    try:
        if body.received_bytes <= QUICK_BYTES:
            return work(b"".join(body.chunks), get_model(request), runtime.config)
        if body.received_bytes <= SMALL_BYTES:
            async with runtime.loop_work_pacer:
                return work(b"".join(body.chunks), get_model(request), runtime.config)
    except NeedsWorker:
        slow = True
    tenant = tenant_of(request.scope)
    try:
        working = runtime.workers.run_job(partial(measured, work=work), body.chunks, tenant, is_slow=slow)
        made, size = await cancel_on_disconnect(request.receive, working)
    except UnfetchedImagesError as needed:
        coming = _fetched(runtime, tenant, needed.fields_by_url, partial(grow_request_lease, request.scope))
        fetched = await cancel_on_disconnect(request.receive, coming)
        again = partial(measured, work=partial(with_fetched, work=work, fetched=fetched))
        beside = sum(map(len, fetched.values()))
        working = runtime.workers.run_job(again, body.chunks, tenant, is_slow=slow, extra_bytes=beside)
        made, size = await cancel_on_disconnect(request.receive, working)
    try:
        grow_request_lease(request.scope, size)
    except Exception:
        del made  # else it stays as long as the error's traceback
        raise
    return made


async def _fetched(
    runtime: ModelRuntime, tenant: Tenant, urls: Mapping[str, str], hold: Callable[[int], None]
) -> dict[str, bytes]:
    """The images of a request, when it is its turn. Raises what ImageFetcher.fetch_images raises."""
    async with runtime.fetch_semaphore.hold_slot(tenant.name):
        return await runtime.image_fetcher.fetch_images(urls, hold)


def with_fetched(
    given: bytes, model: ServedModel, config: ServerConfig, *, work: Work[Result], fetched: dict[str, bytes]
) -> Result:
    """The result of `work` for a body of which some images had to be fetched."""
    return work(given, replace(model, fetched_images=fetched), config)


class Documented(dict[str, Any]):
    """What the OpenAPI description says of a route that takes one of these bodies, for FastAPI's `openapi_extra`."""

    def __init__(self, *models: type[BaseModel]) -> None:
        references = [{"$ref": REFERENCES.format(model=model.__name__)} for model in models]
        schema = references[0] if len(models) == 1 else {"anyOf": references}
        super().__init__(requestBody={"required": True, "content": {"application/json": {"schema": schema}}})
        self.models = models


def describe_bodies(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Add the schemas of the bodies that these routers take to the application's OpenAPI description."""
    describe = app.openapi
    extras = [route.openapi_extra for router in routers for route in router.routes if isinstance(route, APIRoute)]
    models = {model: None for extra in extras if isinstance(extra, Documented) for model in extra.models}

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schemas = describe().setdefault("components", {}).setdefault("schemas", {})
            for model in models:
                schema = model.model_json_schema(ref_template=REFERENCES)
                schemas.update(schema.pop("$defs", {}))
                schemas[model.__name__] = schema
        return describe()

    app.openapi = openapi  # type: ignore[method-assign]
