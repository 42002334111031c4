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

from quire.engine.errors import InvalidRequest
from quire.engine.types import Adapter
from quire.server.access.authentication import tenant_of
from quire.server.access.bodies import Body
from quire.server.access.held import hold
from quire.server.access.tenants import Tenant
from quire.server.again import Here, pinned, why_not_again
from quire.server.config import ServerConfig
from quire.server.generation.spec import CallSpec, GenerationSpec
from quire.server.images.asked import NeedsImages
from quire.server.observe.request_log import HEADER, is_sound
from quire.server.protocol.common import IGNORED, ignored_header
from quire.server.resolve.checks import NeedsWorker
from quire.server.resolve.common import Resolved, measured
from quire.server.resolve.parse import Model, body_as
from quire.server.runtime import Runtime, runtime_of, server_of
from quire.server.served_model import ServedModel, model_of
from quire.server.sse import CLIENT_CLOSED_REQUEST, unless_left
from quire.server.store.progress import Progress
from quire.server.streams import BODY, KEY, PATHS, RESUMED

Result = TypeVar("Result")
Spec = TypeVar("Spec", bound=CallSpec)
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

    What was made of it is held until the request is answered: see server/access/held.py.

    Raises what Bodies.read, WorkerPool.run and Hold.grow raise; HTTPException, which nobody will see, when the client
    has left.
    """
    keep = server_of(request).streams is not None and request.scope["path"] in PATHS
    try:
        async with server_of(request).bodies.read(request) as body:
            pieces = tuple(body.pieces) if keep else ()
            made = await _here_or_there(request, body, work)
            if keep:
                hold(request.scope, body.size)
                request.scope[BODY] = b"".join(pieces)
            return made
    except ClientDisconnect:
        raise HTTPException(CLIENT_CLOSED_REQUEST) from None


async def parsed(request: Request, body: type[Model]) -> Model:
    """The request's body as this model. Raises what `worked_on` raises, and InvalidRequest naming the field."""
    return await worked_on(request, partial(body_as, body=body))


async def resolved_spec(request: Request, resolve: Work[Resolved]) -> GenerationSpec:
    """The spec of a generation that the engine can compute, whose answer has the id that its caller chose: the body's
    request_id, or the header X-Request-Id.

    Raises what `worked_on` and GrammarChecker.check raise.
    """
    return await checked(request, await worked_on(request, resolve))


async def checked(request: Request, call: Resolved) -> GenerationSpec:
    """The same of a call that is resolved."""
    tenant = tenant_of(request.scope)
    if call.grammars:
        holding = runtime_of(request).grammars.held(call, tenant, model_of(request))
        call = await unless_left(request.receive, holding)
    spec = replace(of_caller(request, call.spec), grammar_field=call.grammars[-1][0] if call.grammars else None)
    if call.receipts:
        receipt = wants_receipt(request, spec)
        spec = replace(spec, receipt=receipt, recorded=receipt or runtime_of(request).receipts.log is not None)
    return await _pinned(request, spec) if BODY in request.scope else _without_key(request, spec)


def of_caller(request: Request, spec: Spec) -> Spec:
    """The spec with what the server knows of its caller. Raises ModelNotFound where its adapter has been unloaded."""
    tenant, urgency = tenant_of(request.scope), server_of(request).gateways.priority(request.scope)
    return replace(
        spec,
        name=spec.name or chosen_name(request, spec.id_prefix),
        tenant=tenant.name,
        weight=tenant.weight,
        priority=spec.priority if urgency is None else urgency,
        cache_salt=tenant.salt(spec.cache_salt),
        adapter=chosen_adapter(request, spec.model),
    )


def _without_key(request: Request, spec: GenerationSpec) -> GenerationSpec:
    """A spec that cannot be asked for again. If the request has an Idempotency-Key, a header of the answer says that it
    has no effect. Raises InvalidRequest instead if the server is strict."""
    if KEY not in request.headers:
        return spec
    before = spec.headers.get(IGNORED)
    told = ignored_header(["Idempotency-Key"], runtime_of(request).config.strict)
    return replace(spec, headers={**spec.headers, IGNORED: ", ".join(filter(None, (before, told[IGNORED])))})


async def _pinned(request: Request, spec: GenerationSpec) -> GenerationSpec:
    """A spec that may be asked for again, or one that is. Raises what Streams.claimed raises."""
    streams, owner = server_of(request).streams, owner_of(request)
    assert streams is not None
    if spec.response is not None and spec.response.conversation is not None:  # which is another one the next time
        if KEY in request.headers:
            raise InvalidRequest("Idempotency-Key: not with a conversation, which each answer changes", param=KEY)
        del request.scope[BODY]
        return spec
    resumed = request.scope.get(RESUMED)
    if resumed is None:
        resumed = await streams.claimed(request, owner, request.scope[BODY], stream=spec.stream)
        request.scope[RESUMED] = resumed
    if resumed is not None and (why := why_not_again(resumed, spec, here_of(request))) is not None:
        if not resumed.call.pins.background:
            raise HTTPException(409, why)
        resumed = replace(resumed, call=msgspec.structs.replace(resumed.call, progress=Progress()))
    keyed = KEY in request.headers or (resumed is not None and resumed.call.key is not None)
    return pinned(spec, resumed, keyed=keyed, kept=runtime_of(request).info.deterministic or streams.keeps_all)


def wants_receipt(request: Request, spec: GenerationSpec) -> bool:
    """Raises InvalidRequest if the request asks for a receipt that it cannot have."""
    asked = request.headers.get(RECEIPT, "").lower() in ("1", "true")
    if asked and (spec.beam_search or request.scope["path"].startswith("/api/")):
        what = "use_beam_search" if spec.beam_search else "Ollama's API"
        raise InvalidRequest(f"{RECEIPT} is not available with {what}", param=RECEIPT)
    return spec.receipt or asked


def here_of(request: Request) -> Here:
    runtime = runtime_of(request)
    info, config = runtime.info, runtime.config
    weights = (
        info.content or info.model,
        info.dtype,
        runtime.client.link.weights_version,
        config.quantization,
        config.quantize_embedding,
    )
    return Here(model_of(request).fingerprint, info.deterministic, repr(weights))


def owner_of(request: Request) -> str:
    """Whose data this is: the digest of the key, because a key's name may be given to another key."""
    return tenant_of(request.scope).digest.hex()


def chosen_adapter(request: Request, name: str) -> Adapter | None:
    """The adapter that a resolved model name stands for; None: the model itself. Raises ModelNotFound where it has been
    unloaded since."""
    adapters, model = runtime_of(request).adapters, model_of(request)
    if adapters is None or name in model.names:
        return None
    return adapters.find(model.answer_name(name))


def chosen_name(request: Request, prefix: str) -> str:
    """The answer's id by the header X-Request-Id; "" where it has none or none that is safe."""
    header = request.headers.get(HEADER)
    return f"{prefix}{header}" if is_sound(header) else ""


async def _here_or_there(request: Request, body: Body, work: Work[Result]) -> Result:
    """What `work` makes of a body: small ones are worked on at once, others in a worker."""
    runtime, slow = runtime_of(request), False
    try:
        if body.size <= QUICK_BYTES:
            return work(b"".join(body.pieces), model_of(request), runtime.config)
        if body.size <= SMALL_BYTES:
            async with runtime.turns:
                return work(b"".join(body.pieces), model_of(request), runtime.config)
    except NeedsWorker:
        slow = True
    tenant = tenant_of(request.scope)
    try:
        working = runtime.workers.run(partial(measured, work=work), body.pieces, tenant, slow=slow)
        made, size = await unless_left(request.receive, working)
    except NeedsImages as needed:
        coming = _fetched(runtime, tenant, needed.urls, partial(hold, request.scope))
        fetched = await unless_left(request.receive, coming)
        again = partial(measured, work=partial(with_fetched, work=work, fetched=fetched))
        beside = sum(map(len, fetched.values()))
        working = runtime.workers.run(again, body.pieces, tenant, slow=slow, beside=beside)
        made, size = await unless_left(request.receive, working)
    try:
        hold(request.scope, size)
    except Exception:
        del made  # else it stays as long as the error's traceback
        raise
    return made


async def _fetched(
    runtime: Runtime, tenant: Tenant, urls: Mapping[str, str], hold: Callable[[int], None]
) -> dict[str, bytes]:
    """The images of a request, when it is its turn. Raises what Fetcher.all raises."""
    async with runtime.fetch_turns.turn(tenant.name):
        return await runtime.fetcher.all(urls, hold)


def with_fetched(
    given: bytes, model: ServedModel, config: ServerConfig, *, work: Work[Result], fetched: dict[str, bytes]
) -> Result:
    """The result of `work` for a body of which some images had to be fetched."""
    return work(given, replace(model, fetched=fetched), config)


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
