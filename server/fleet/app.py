"""The ASGI application of several models: gives each request to the app of the model that it names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.errors import ConfigError, InvalidRequest, Overloaded, QuireError, RequestNotFound
from quire.engine.folder import explained
from quire.server.access.authentication import AuthenticationMiddleware
from quire.server.access.bodies import READ, Bodies, Body
from quire.server.access.gateways import Gateways
from quire.server.access.tenants import Tenants
from quire.server.app import BODIES_BYTES
from quire.server.config import ServerConfig
from quire.server.encoding import encode_json
from quire.server.errors import RETRY_AFTER_SECONDS, UnexpectedErrorMiddleware, answer, failure, http_failure
from quire.server.fleet.added import Added
from quire.server.fleet.config import FleetConfig
from quire.server.fleet.fleet import Fleet, Member

_ASLEEP = frozenset({"/tokenize", "/detokenize", "/sleep", "/wake_up", "/update_weights", "/v1/messages/count_tokens"})
"""What is posted here needs no engine, or wakes it itself."""
_NOT_HERE = ("/v1/files", "/v1/batches")
"""Paths of what a server of one model keeps."""
_BY_ID = ("/v1/streams/", "/v1/responses/", "/v1/conversations/", "/v1/requests/", "/v1/chat/completions/")
"""Paths that name what one of the models made, and not the model."""


class _Named(msgspec.Struct):
    model: str | None = None


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    model: str = ""


class _Load(_Change):
    settings: dict[str, Any] | None = None
    """Of a model that is not there yet: what its table in the file would say."""


class _Unload(_Change):
    forget: bool = False
    """Serve it no more: one that was added while the server ran."""


Change = TypeVar("Change", bound=_Change)


class FleetApp:
    """Beside the models' own routes: GET /v1/models has all of them with their `state`, /metrics those of all that are
    loaded, and POST /v1/models/load and /v1/models/unload are an admin's. Where nothing names a model, a request is for
    the first; the query parameter `model` names one too."""

    def __init__(
        self, fleet: Fleet, settings: FleetConfig, added: Added, config: ServerConfig, tenants: Tenants
    ) -> None:
        self._fleet, self._settings, self._added = fleet, settings, added
        most = int(config.max_body_size * 2**20)
        self._bodies = Bodies(most, BODIES_BYTES)
        guarded = AuthenticationMiddleware(self._answer, tenants, Gateways(config))
        self._guarded: ASGIApp = UnexpectedErrorMiddleware(guarded)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guarded(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        try:
            if path.startswith(_NOT_HERE):
                raise RequestNotFound("With --models there are no files and batches: serve the model alone for them")
            if method in ("GET", "HEAD") and path in ("/health", "/live", "/ready", "/ping"):
                response = Response(status_code=200 if self._fleet.alive else 503)
            elif method == "GET" and path == "/v1/models":
                response = await self._models(scope)
            elif method == "GET" and path == "/metrics":
                response = Response(merged([text async for text in self._each(scope)]), media_type="text/plain")
            elif method == "POST" and path in ("/v1/models/load", "/v1/models/unload"):
                change = self._load if path.endswith("/load") else self._unload
                async with self._bodies.read(Request(scope, receive)) as body:
                    member = await change(b"".join(body.pieces), receive)
                told = {"model": member.entry.name, "state": member.state}
                response = Response(encode_json(told), media_type="application/json")
            else:
                return await self._pass(scope, receive, send)
        except HTTPException as error:
            response = answer(path, http_failure(error))
        except QuireError as error:
            wrong = failure(error)
            response = answer(path, wrong, {"Retry-After": RETRY_AFTER_SECONDS} if wrong.status == 503 else {})
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Give the request to the app of its model."""
        name = QueryParams(scope["query_string"]).get("model")
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return await self._to_model(scope, receive, send, name, None)
        async with self._bodies.read(Request(scope, receive)) as body:
            await self._to_model(scope, receive, send, _named(b"".join(body.pieces)) or name, body)

    async def _to_model(self, scope: Scope, receive: Receive, send: Send, name: str | None, body: Body | None) -> None:
        """The model is loaded first if need be. Its app takes the body over, and gives up its place in the budget."""
        path = scope["path"]
        if name is None and path.startswith(_BY_ID):
            return await self._by_id(scope, receive, send, body)
        if path.startswith("/v1/models/") and name is None:
            name = path.removeprefix("/v1/models/")
        member = self._fleet.members[0] if name is None else self._fleet.find(name)
        scope[READ] = body
        if body is None or path in _ASLEEP:
            app = member.app or await self._loaded(member, receive)
            return await app(scope, receive, send)
        with self._fleet.wanted(member):
            app = member.app or await self._loaded(member, receive)
            await app(scope, receive, send)

    async def _loaded(self, member: Member, receive: Receive) -> FastAPI:
        """Raises ClientDisconnect when nobody waits for it any more."""
        with self._fleet.wanted(member):
            load = asyncio.create_task(self._fleet.loaded(member))
            left = asyncio.create_task(_left(receive))
            try:
                await asyncio.wait((load, left), return_when=asyncio.FIRST_COMPLETED)
                if not load.done():
                    raise ClientDisconnect
                return load.result()
            finally:
                load.cancel()
                left.cancel()

    async def _by_id(self, scope: Scope, receive: Receive, send: Send, body: Body | None) -> None:
        """The answer of the first model that knows it. They are only lent the body: the next one may need it."""
        if not (apps := self._fleet.apps):
            raise RequestNotFound("No model is loaded that could know it")
        for app in apps:
            lent = None if body is None else Body(body.owner, pieces=body.pieces, size=body.size)
            if await _tried(app, {**scope, READ: lent}, receive, send, last=app is apps[-1]):
                return

    async def _load(self, body: bytes, receive: Receive) -> Member:
        """A new model is kept only if it can be loaded."""
        asked = _decoded(body, _Load)
        if asked.settings is None:
            await self._loaded(member := self._fleet.find(asked.model), receive)
            return member
        try:
            entry = await asyncio.to_thread(self._settings.entry, asked.model, asked.settings)
        except ConfigError as error:
            raise InvalidRequest(error.message, param=error.param) from None
        member = self._fleet.add(entry)
        try:
            await self._loaded(member, receive)
        except BaseException as error:
            await self._fleet.remove(member)
            if isinstance(error, Overloaded):
                raise InvalidRequest(f"settings: {error.message}", param="settings") from None
            raise
        self._added.add(asked.model, asked.settings)
        return member

    async def _unload(self, body: bytes, _: Receive) -> Member:
        asked = _decoded(body, _Unload)
        member = self._fleet.find(asked.model)
        if not asked.forget:
            await self._fleet.unload(member)
            return member
        if member.entry.name not in self._added:
            raise InvalidRequest("forget: the model is in the file of --models", param="forget")
        self._added.forget(member.entry.name)
        await self._fleet.remove(member)
        return member

    async def _models(self, scope: Scope) -> Response:
        cards: list[dict[str, Any]] = []
        for member in self._fleet.members:
            if member.app is not None:
                found = msgspec.json.decode(await _body(member.app, scope))["data"]
            else:
                found = [{"id": name, "object": "model", "owned_by": "quire"} for name in member.names]
            cards += [card | {"state": member.state} for card in found]
        told = {"object": "list", "data": cards, "has_more": False}
        told |= {"first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return Response(encode_json(told), media_type="application/json")

    async def _each(self, scope: Scope) -> AsyncIterator[str]:
        for app in self._fleet.apps:
            yield (await _body(app, scope)).decode()


def _decoded(body: bytes, kind: type[Change]) -> Change:
    try:
        asked = msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        told = explained(error) if isinstance(error, msgspec.ValidationError) else "the body is not JSON"
        raise InvalidRequest(told, param=told.partition(":")[0] if ":" in told else None) from None
    if not asked.model:
        raise InvalidRequest("model is required", param="model")
    return asked


def _named(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None  # which the app that gets it will tell


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(app: ASGIApp, scope: Scope) -> bytes:
    """Of an app's answer to the same request."""
    pieces: list[bytes] = []

    async def nothing() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def keep(message: Message) -> None:
        pieces.append(message.get("body", b""))

    await app(dict(scope), nothing, keep)
    return b"".join(pieces)


async def _tried(app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, last: bool) -> bool:
    """Whether the app's answer was sent: one of 404 is only if it is the last one's."""
    status = 0

    async def unless_missing(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        if last or status != 404:
            await send(message)

    await app(scope, receive, unless_missing)
    return last or status != 404


def merged(texts: Iterable[str]) -> str:
    """Metrics of several models, told apart by their label model_name: all lines of one metric together."""
    families: dict[str, tuple[dict[str, None], list[str]]] = {}
    for text in texts:
        heads: dict[str, None] = {}
        samples: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                heads, samples = families.setdefault(line.split(" ", 3)[2], ({}, []))
            if line.startswith("#"):
                heads[line] = None
            else:
                samples.append(line)
    return "".join(f"{line}\n" for heads, samples in families.values() for line in (*heads, *samples))
