"""The application for several models. Each request goes to the model that it names, which is loaded first if
necessary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.engine.errors import ConfigError, InvalidRequest, Overloaded
from quire.engine.folder import explained
from quire.server.access.bodies import READ, Body
from quire.server.access.tenants import Tenants
from quire.server.app import application
from quire.server.config import ServerConfig
from quire.server.errors import OLLAMA, SYSTEM_ONE
from quire.server.fleet.added_models import AddedModels
from quire.server.fleet.config import FleetConfig
from quire.server.fleet.fleet import Fleet, Member
from quire.server.fleet.presets import apply
from quire.server.protocol.questions.systemone import alias_of_own
from quire.server.resolve.translated.ollama import untagged
from quire.server.routes.models import cards, listed
from quire.server.routes.ollama.endpoints import held, named, tagged
from quire.server.routes.status import told_health
from quire.server.runtime import Models, Runtime, server_of
from quire.server.sse import CLIENT_CLOSED_REQUEST, unless_left

router = APIRouter(include_in_schema=False)


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
            yield FleetModels(fleet, settings, added)
        finally:
            await fleet.stop()

    return application(config, tenants, models, [router])


class FleetModels:
    """Where nothing names a model, a request is for the first; the query parameter `model` names one too."""

    def __init__(self, fleet: Fleet, settings: FleetConfig, added: AddedModels) -> None:
        self.fleet, self.settings, self.added = fleet, settings, added

    @property
    def loaded(self) -> list[Runtime]:
        return self.fleet.loaded

    async def give(
        self, answer: ASGIApp, scope: Scope, receive: Receive, send: Send, *, awake: bool, named: bool
    ) -> None:
        """It gets the body read, which has its place in the budget until it takes the body over."""
        request, path = Request(scope, receive), scope["path"]
        name = request.query_params.get("model") or request.path_params.get("model")
        if request.method not in ("POST", "PUT", "PATCH"):
            if named:
                scope["runtime"] = await self.load(self._member(path, name), receive)
            return await answer(scope, receive, send)
        try:
            async with server_of(request).bodies.read(request) as body:
                scope[READ] = body
                name = name if (found := _named(path, b"".join(body.pieces))) is None else found
                self._fill(path, name, body)
                member = self._member(path, name) if named else self._any()
                with self.fleet.wanted(member) if awake else nullcontext():
                    scope["runtime"] = await self.load(member, receive)
                    await answer(scope, receive, send)
        except ClientDisconnect:
            raise HTTPException(CLIENT_CLOSED_REQUEST) from None

    def _fill(self, path: str, name: str | None, body: Body) -> None:
        """Put what the model's name says into a request that does not say it."""
        if name is None:
            name = self.fleet.members[0].entry.name
        elif path.startswith(OLLAMA):
            name = untagged(name, self.settings.presets)
        if (preset := self.settings.presets.get(name)) is not None:
            apply(preset, path, body)

    def _any(self) -> Member:
        """A model that is loaded, or the first."""
        return next((member for member in self.fleet.members if member.runtime is not None), self.fleet.members[0])

    def _member(self, path: str, name: str | None) -> Member:
        """The model of this name, by default the first. Raises ModelNotFound."""
        members = self.fleet.members
        names = [each for member in members for each in member.names]
        if name is None or (path == SYSTEM_ONE and alias_of_own(name, names)):
            return members[0]
        return self.fleet.find(untagged(name, names) if path.startswith(OLLAMA) else name)

    async def load(self, member: Member, receive: Receive) -> Runtime:
        """Wait until it is loaded. Raises what the load raises; HTTPException when nobody waits for it any more."""
        if member.runtime is not None:
            return member.runtime
        with self.fleet.wanted(member):
            return await unless_left(receive, self.fleet.load(member))


@router.api_route("/health", methods=["GET", "HEAD"], response_model=None)
@router.api_route("/live", methods=["GET", "HEAD"], response_model=None)
@router.api_route("/ready", methods=["GET", "HEAD"], response_model=None)
@router.api_route("/ping", methods=["GET", "HEAD"], response_model=None)
async def health(request: Request) -> Response:
    """200 while models can be loaded and woken."""
    return told_health(request, well=_models_of(request).fleet.alive)


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
        async with server_of(request).bodies.read(request) as body:
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
