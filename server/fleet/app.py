"""The application of several models: each request is for the model that it names, which is loaded first if need be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine.errors import ConfigError, InvalidRequest, Overloaded
from quire.engine.folder import explained
from quire.server.access.bodies import READ, Bodies
from quire.server.access.tenants import Tenants
from quire.server.app import application
from quire.server.config import ServerConfig
from quire.server.errors import OLLAMA, SYSTEM_ONE
from quire.server.fleet.added_models import AddedModels
from quire.server.fleet.config import FleetConfig
from quire.server.fleet.fleet import Fleet, Member
from quire.server.protocol.questions.systemone import alias_of_own
from quire.server.resolve.translated.ollama import untagged
from quire.server.routes.bodies import CLIENT_CLOSED_REQUEST
from quire.server.routes.models import cards, listed
from quire.server.routes.ollama.endpoints import held, named, tagged
from quire.server.runtime import BODIES_BYTES, Models, Runtime

router = APIRouter(include_in_schema=False)
_ASLEEP = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/apply-template",
        "/sleep",
        "/wake_up",
        "/update_weights",
        "/v1/messages/count_tokens",
    }
)
"""What is posted here needs no engine, or wakes it itself."""
_OF_ALL = frozenset({"/v1/models", "/api/tags", "/api/ps", "/metrics", "/load", "/health", "/live", "/ready", "/ping"})
_CHANGES = "/v1/models/load", "/v1/models/unload", "/api/pull"
_FILES = "/v1/files"
"""Bodies that are sent here are forms."""
_STORED = ("/v1/streams/", "/v1/responses/", "/v1/conversations", "/v1/requests/", "/v1/batches", _FILES)
"""Paths of what is the whole server's, whichever model made it."""


class _Named(msgspec.Struct):
    model: str | None = None
    name: str | None = None
    """What Ollama's older clients call it."""


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    model: str = ""


class _Load(_Change):
    settings: dict[str, Any] | None = None
    """Of a model that is not there yet: what its table in the file would say."""


class _Unload(_Change):
    forget: bool = False
    """Serve it no more: one that was added while the server ran."""


Change = TypeVar("Change", bound=_Change)


def fleet_app(
    fleet: Fleet, settings: FleetConfig, added: AddedModels, config: ServerConfig, tenants: Tenants
) -> FastAPI:
    """An ASGI application that serves a fleet, which starts and ends with its lifespan. Beside the routes of all
    servers: GET /v1/models has all models with their `state`, and POST /v1/models/load and /v1/models/unload are an
    admin's. Raises what `application` raises."""

    @asynccontextmanager
    async def models() -> AsyncIterator[Models]:
        try:
            await fleet.start()
            yield FleetModels(fleet, settings, added, config)
        finally:
            await fleet.stop()

    return application(config, tenants, models, [router])


class FleetModels:
    """Where nothing names a model, a request is for the first; the query parameter `model` names one too."""

    def __init__(self, fleet: Fleet, settings: FleetConfig, added: AddedModels, config: ServerConfig) -> None:
        self.fleet, self.settings, self.added = fleet, settings, added
        self.bodies = Bodies(int(config.max_body_size * 2**20), BODIES_BYTES)

    @property
    def loaded(self) -> list[Runtime]:
        return self.fleet.loaded

    async def give(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """It gets the body read, which has its place in the budget until it takes the body over."""
        answering = ExceptionMiddleware(partial(self._give, app), scope["app"].exception_handlers)
        await answering(scope, receive, send)

    async def _give(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        path, name = scope["path"], QueryParams(scope["query_string"]).get("model") or None
        with_body = scope["method"] in ("POST", "PUT", "PATCH")
        if path in _OF_ALL or path.startswith(_FILES) or (with_body and path in _CHANGES):
            return await app(scope, receive, send)
        if not with_body:
            if name is None and path.startswith(_STORED):
                return await app(scope, receive, send)
            if name is None and path.startswith("/v1/models/"):
                name = path.removeprefix("/v1/models/")
            scope["runtime"] = await self.load(self._member(path, name), receive)
            return await app(scope, receive, send)
        try:
            async with self.bodies.read(Request(scope, receive)) as body:
                scope[READ] = body
                name = name if (found := _named(path, b"".join(body.pieces))) is None else found
                member = self._member(path, name)
                idle = path in _ASLEEP or (name is None and path.startswith(_STORED))
                with nullcontext() if idle else self.fleet.wanted(member):
                    scope["runtime"] = await self.load(member, receive)
                    await app(scope, receive, send)
        except ClientDisconnect:
            raise HTTPException(CLIENT_CLOSED_REQUEST) from None

    def _member(self, path: str, name: str | None) -> Member:
        """The model of this name, or for what is no model's one that is loaded, or the first. Raises ModelNotFound."""
        if name is not None:
            names = [each for member in self.fleet.members for each in member.names]
            if path == SYSTEM_ONE and alias_of_own(name, names):
                return self.fleet.members[0]
            return self.fleet.find(untagged(name, names) if path.startswith(OLLAMA) else name)
        members = self.fleet.members
        there = (member for member in members if member.runtime is not None and path.startswith(_STORED))
        return next(there, members[0])

    async def load(self, member: Member, receive: Receive) -> Runtime:
        """Wait until it is loaded. Raises what the load raises; HTTPException when nobody waits for it any more."""
        if member.runtime is not None:
            return member.runtime
        with self.fleet.wanted(member):
            load = asyncio.create_task(self.fleet.load(member))
            left = asyncio.create_task(_left(receive))
            try:
                await asyncio.wait((load, left), return_when=asyncio.FIRST_COMPLETED)
                if not load.done():
                    raise HTTPException(CLIENT_CLOSED_REQUEST)
                return load.result()
            finally:
                load.cancel()
                left.cancel()


@router.api_route("/health", methods=["GET", "HEAD"], response_model=None)
@router.api_route("/live", methods=["GET", "HEAD"], response_model=None)
@router.api_route("/ready", methods=["GET", "HEAD"], response_model=None)
@router.api_route("/ping", methods=["GET", "HEAD"], response_model=None)
async def health(request: Request) -> Response:
    """200 while models can be loaded and woken."""
    return Response(status_code=200 if _models_of(request).fleet.alive else 503)


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for member in _models_of(request).fleet.members:
        if member.runtime is not None:
            of_one = cards(member.runtime.model)
        else:
            of_one = [{"id": name, "object": "model", "owned_by": "quire"} for name in member.names]
        found += [card | {"state": member.state} for card in of_one]
    return listed(found)


@router.get("/api/tags")
async def tags(request: Request) -> dict[str, Any]:
    """All models, for Ollama's clients."""
    found: list[dict[str, Any]] = []
    for member in _models_of(request).fleet.members:
        found += [named(name) for name in member.names] if member.runtime is None else tagged(member.runtime)
    return {"models": found}


@router.get("/api/ps")
async def running(request: Request) -> dict[str, Any]:
    """Those that are awake."""
    awake = [member.runtime for member in _models_of(request).fleet.members if member.state == "awake"]
    return {"models": [each for runtime in awake if runtime is not None for each in held(runtime)]}


@router.post("/v1/models/load")
async def load(request: Request) -> dict[str, str]:
    """Load a model. A new one is kept only if it can be loaded."""
    models, asked = _models_of(request), await _decoded(request, _Load)
    if asked.settings is None:
        await models.load(member := models.fleet.find(asked.model), request.receive)
        return _told(member)
    try:
        entry = await asyncio.to_thread(models.settings.entry, asked.model, asked.settings)
    except ConfigError as error:
        raise InvalidRequest(error.message, param=error.param) from None
    member = models.fleet.add(entry)
    try:
        await models.load(member, request.receive)
    except BaseException as error:
        await models.fleet.remove(member)
        if isinstance(error, Overloaded):
            raise InvalidRequest(f"settings: {error.message}", param="settings") from None
        raise
    models.added.add(asked.model, asked.settings)
    return _told(member)


@router.post("/v1/models/unload")
async def unload(request: Request) -> dict[str, str]:
    models, asked = _models_of(request), await _decoded(request, _Unload)
    member = models.fleet.find(asked.model)
    if not asked.forget:
        await models.fleet.unload(member)
        return _told(member)
    if member.entry.name not in models.added:
        raise InvalidRequest("forget: the model is in the file of --models", param="forget")
    models.added.forget(member.entry.name)
    await models.fleet.remove(member)
    return _told(member)


def _models_of(request: Request) -> FleetModels:
    models = request.app.state.server.models
    assert isinstance(models, FleetModels)
    return models


def _told(member: Member) -> dict[str, str]:
    return {"model": member.entry.name, "state": member.state}


async def _decoded(request: Request, kind: type[Change]) -> Change:
    try:
        async with _models_of(request).bodies.read(request) as body:
            asked = msgspec.json.decode(b"".join(body.pieces), type=kind)
    except ClientDisconnect:
        raise HTTPException(CLIENT_CLOSED_REQUEST) from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        told = explained(error) if isinstance(error, msgspec.ValidationError) else "the body is not JSON"
        raise InvalidRequest(told, param=told.partition(":")[0] if ":" in told else None) from None
    if not asked.model:
        raise InvalidRequest("model is required", param="model")
    return asked


def _named(path: str, body: bytes) -> str | None:
    try:
        found = msgspec.json.decode(body, type=_Named)
        return found.model or found.name if path.startswith(OLLAMA) else found.model
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None  # which the route will tell


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
