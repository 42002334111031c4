"""Receives requests from Serve's HTTP proxies and parses them so that Serve's router can choose a replica. Resends a
request if its replica has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.ray.call import Call, Head, make_call
from deploy.ray.resume import KeptStream, ResumableStream
from quire.engine.common.errors import EngineError, Overloaded, QuireError
from quire.server.access.authentication import AuthenticationMiddleware
from quire.server.access.body_reader import BodyReader
from quire.server.access.cors import wrap_in_cors
from quire.server.access.gateway_headers import TrustedGateways
from quire.server.access.path_rules import ADMIN_PATHS, ADMIN_PREFIX, PUBLIC_PATHS
from quire.server.access.tenants import Tenants
from quire.server.access.unexpected_errors import UnexpectedErrorMiddleware
from quire.server.config import ServerConfig
from quire.server.error_responses import (
    RETRY_AFTER_SECONDS,
    encode_openai_stream_error,
    error_info,
    error_response,
    http_error_info,
)
from quire.server.observe.metric_sums import LabelingCollector

log = logging.getLogger("quire.server")

BODIES_BYTES = 64 * 2**20
"""Memory for bodies received concurrently."""
ATTEMPTS = 3
"""Give up after this many replicas have ended: the request may be the cause."""
LOST = (RayActorError, ReplicaUnavailableError)
"""Raised for a replica that ended or is unreachable."""
OF_ALL_REPLICAS = PUBLIC_PATHS | {"/metrics"}
_OF_ONE_REPLICA = (ADMIN_PREFIX, "/v1/requests/")
FILES = "/v1/files"
"""Its bodies are forms."""
_KEPT = ("/v1/conversations", "/v1/responses/", FILES, "/v1/batches", "/v1/streams/")
"""Needs data_dir, which all replicas share."""
_WAITS = 30
"""Seconds that a stream waits for replicas that can continue it soon."""


class Gateway:
    def __init__(self, config: ServerConfig, replica: DeploymentHandle) -> None:
        self._replica = replica.options(stream=True)
        self._keeps = config.data_dir is not None
        self._bodies = BodyReader(int(config.max_body_size * 2**20), BODIES_BYTES)
        app: ASGIApp = AuthenticationMiddleware(self._answer, Tenants(config), TrustedGateways(config))
        app = UnexpectedErrorMiddleware(app)
        self._app = wrap_in_cors(app, config) if config.allowed_origins else app

    async def __call__(self, request: Request) -> Response:
        return _FromApp(self._app)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        try:
            if path in ADMIN_PATHS or path.startswith(_OF_ONE_REPLICA):
                message = f"{path} is about one replica, and there may be several: see docs/deploy/ray.md"
                raise HTTPException(501, message)
            if path.startswith(_KEPT) and not self._keeps:
                message = f"{path} needs data_dir, in which replicas keep things: see docs/deploy/ray.md"
                raise HTTPException(501, message)
            async with self._call(scope, receive) as call:
                if path not in OF_ALL_REPLICAS:
                    async with aclosing(self._parts(call)) as parts:
                        return await _send(parts, call, send)
                response = _together(path, await self._ask_all(call))
        except HTTPException as error:
            response = error_response(path, http_error_info(error))
        except (QuireError, BackPressureError, DeploymentUnavailableError, TimeoutError, *LOST) as error:
            told = error_info(_told(error))
            response = error_response(path, told, {"Retry-After": RETRY_AFTER_SECONDS} if told.status == 503 else {})
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    @asynccontextmanager
    async def _call(self, scope: Scope, receive: Receive) -> AsyncIterator[Call]:
        """The body keeps its memory until the block ends, because another replica may need it."""
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            yield make_call(scope, scope["headers"], b"", seeds=False)
            return
        async with self._bodies.hold_request_body(Request(scope, receive), json=scope["path"] != FILES) as body:
            whole = b"".join(body.chunks)
            body.chunks.clear()
            yield make_call(scope, scope["headers"], whole, seeds=not self._keeps)

    async def _parts(self, call: Call) -> AsyncGenerator[Head | bytes]:  # noqa: PLR0912 (a call that goes on with another replica: one state machine)
        """The head of an answer and its body. If the replica ends, another gets the call, unless the client has part of
        an answer that cannot be continued.
        """
        stream = ResumableStream() if call.resumable else None
        kept, asked = KeptStream(call), call
        head: Head | None = None
        attempt = waits = 0
        while True:
            answers = self._replica.answer.remote(asked)
            attempt += 1
            try:
                async for part in answers:
                    if not isinstance(part, Head):
                        if part := kept.note(part) if stream is None else stream.next(part):
                            yield part
                    elif head is None:
                        kept.begins(part)
                        yield (head := part)
                    elif not part.is_stream:
                        if part.named(b"retry-after") is None or waits == _WAITS:
                            raise EngineError("the replica ended, and another one refused to go on with its stream")
                        break
                else:
                    return
                waits += 1
                attempt -= 1
                await asyncio.sleep(1)
            except LOST as error:
                log.warning("%s %s: its replica was lost: %s", call.method, call.path, str(error).partition("\n")[0])
                if stream is not None and stream.ended:
                    return
                if attempt == ATTEMPTS:
                    raise
                if head is not None and stream is not None and head.is_stream:
                    stream.restart()
                elif head is not None and (rest := kept.call) is not None:
                    asked = rest
                elif head is not None:
                    raise
            finally:
                answers.cancel()

    async def _ask_all(self, call: Call) -> list[tuple[str, Head, bytes]]:
        """Names and answers of all replicas that answer, including full ones. Raises TimeoutError."""
        replies = await self._replica.broadcast("whole", call).results_async(timeout_s=10, return_exceptions=True)
        return [each for each in replies if not isinstance(each, BaseException)]


def _together(path: str, answers: list[tuple[str, Head, bytes]]) -> Response:
    """One answer for all replicas: metrics get the label replica; a probe needs one healthy replica."""
    if path != "/metrics":
        return Response(status_code=200 if any(head.status == 200 for _, head, _ in answers) else 503)
    texts = {name: body.decode() for name, head, body in answers if head.status == 200}
    all_of = CollectorRegistry()
    all_of.register(
        LabelingCollector(
            "replica", {name: partial(text_string_to_metric_families, text) for name, text in texts.items()}
        )
    )
    return Response(generate_latest(all_of), media_type="text/plain")


async def _send(parts: AsyncGenerator[Head | bytes], call: Call, send: Send) -> None:
    """A failing stream ends with an error event; errors before the first byte are raised."""
    head: Head | None = None
    last = b""
    try:
        async for part in parts:
            if isinstance(part, Head):
                head = part
                await send({"type": "http.response.start", "status": head.status, "headers": head.headers})
            else:
                await send({"type": "http.response.body", "body": part, "more_body": True})
    except (QuireError, *LOST) as error:
        if head is None:
            raise
        if not head.is_stream:
            raise RuntimeError("the answer was cut off") from error  # the connection is cut off too
        told = _told(error)
        anthropic = b"event: error\ndata: %b\n\n" % error_info(told).encode_anthropic()
        last = anthropic if call.path == "/v1/messages" else encode_openai_stream_error(told)
    await send({"type": "http.response.body", "body": last, "more_body": False})


def _told(error: Exception) -> QuireError:
    if isinstance(error, QuireError):
        return error
    if isinstance(error, LOST):
        return Overloaded("The replica ended while it computed this answer. Please try again")
    return Overloaded("Too many requests wait already, or no replica can be started. Please try again later")


class _FromApp(Response):
    """Serve sends a response by calling it as an ASGI application; this wraps any application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
