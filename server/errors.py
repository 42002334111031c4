"""One table from exceptions to the error body of each API, before a stream and inside it."""

from __future__ import annotations

import logging
import re
import sqlite3
from dataclasses import dataclass, replace
from difflib import get_close_matches
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.errors import (
    Conflict,
    ContextLengthExceeded,
    EngineError,
    EngineGone,
    InvalidRequest,
    ModelNotFound,
    ModelUnloadable,
    Overloaded,
    QuireError,
    RateLimited,
    RequestNotFound,
    RequestQuarantined,
    Timeout,
)
from quire.server.encoding import DATA, END, encode_ascii, one_line

logger = logging.getLogger("quire.server")

INVALID, SERVER = "invalid_request_error", "server_error"
TABLE: tuple[tuple[type[QuireError], int, str], ...] = (
    (InvalidRequest, 400, INVALID),
    (ModelNotFound, 404, "not_found_error"),
    (RequestNotFound, 404, "not_found_error"),
    (Conflict, 409, INVALID),
    (RateLimited, 429, "rate_limit_error"),
    (Overloaded, 503, SERVER),
    (Timeout, 408, SERVER),
    (EngineGone, 503, SERVER),
    (EngineError, 500, SERVER),
    (QuireError, 500, SERVER),
)
"""Base class, HTTP status and OpenAI's error type; the first matching row counts."""
ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's error types by HTTP status; other statuses have invalid_request_error below 500, api_error from there."""
ABSENT = {
    "/v1/audio/": "its models read text and images and write text: no sound",
    "/v1/images/": "its models write text: no pictures",
    "/v1/videos": "its models write text: no films",
    "/v1/realtime": "its models read text and images and write text: no sound",
    "/v1/moderations": "it judges no texts; /v1/decisions asks a model about one",
    "/v1/fine_tuning/": "it trains nothing; an adapter that was trained elsewhere is loaded by /v1/load_lora_adapter",
    "/v1/assistants": "/v1/responses with /v1/conversations is what OpenAI has put in its place",
    "/v1/threads": "/v1/responses with /v1/conversations is what OpenAI has put in its place",
    "/v1/vector_stores": "it keeps no vectors; /v1/embeddings makes them",
    "/v1/uploads": "a file is sent whole, to /v1/files",
    "/v1/messages/batches": "/v1/batches is what it has for batches",
    "/api/copy": "`quire serve --served-model-name` gives a model another name",
    "/api/create": "models are made by others; `quire serve MODEL` serves one",
    "/api/delete": "`quire rm MODEL` deletes one",
    "/api/push": "it uploads no models",
    "/api/blobs": "it takes no models from requests",
}
"""What others' APIs have and this server has not: how its path begins, and why, or what to use instead."""
SYSTEM_ONE = "/v1/systemone"
"""The route of TypeSafe's API."""
OLLAMA = "/api/"
"""The beginning of the paths of Ollama's API."""
RETRY_AFTER_SECONDS = "1"
UNEXPECTED = "The server had an error while processing your request. The log says more"


def install(app: FastAPI) -> None:
    """Answer the typed errors that routes raise. UnexpectedErrorMiddleware answers others."""
    app.add_exception_handler(QuireError, _typed_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(sqlite3.OperationalError, _typed_error)


_TOO_LONG = re.compile(r"length is (\d+) tokens, but \w+ came to (?:about )?(\d+) tokens")
"""In the message of a ContextLengthExceeded."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client is told of an error."""

    status: int
    message: str
    kind: str
    """OpenAI's type."""
    param: str | None = None
    code: str | None = None

    def body(self, path: str) -> bytes:
        """The JSON body in the form of the API that the path belongs to."""
        return next((form for paths, form in FORMS if paths.fullmatch(path)), Failure.openai)(self)

    def on(self, path: str) -> Failure:
        """As the API that the path belongs to numbers it."""
        return replace(self, status=422) if path == SYSTEM_ONE and self.status == HTTPStatus.BAD_REQUEST else self

    def openai(self) -> bytes:
        # ASCII, because a message may quote half a surrogate pair from the request, which UTF-8 cannot encode.
        told = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return encode_ascii({"error": told})

    def ollama(self) -> bytes:
        """A message alone."""
        return encode_ascii({"error": self.message})

    def system_one(self) -> bytes:
        """FastAPI's form: a `detail` that says what is wrong with the body, or has the type of any other error."""
        if self.status == HTTPStatus.UNPROCESSABLE_ENTITY:
            place = ["body"] if self.param is None else ["body", self.param]
            return encode_ascii({"detail": [{"loc": place, "msg": self.message, "type": "value_error"}]})
        return encode_ascii({"detail": {"error_type": self._type, "message": self.message}})

    def anthropic(self) -> bytes:
        """It has no field for the parameter, so the message names it."""
        message = self.message if self.param is None or self.param in self.message else f"{self.param}: {self.message}"
        if self.code == ContextLengthExceeded.code:  # Claude Code reads these words and both numbers, and compacts
            found = _TOO_LONG.search(message)
            sizes = f"{found[2]} tokens > {found[1]} maximum. " if found else ""
            message = f"prompt is too long: {sizes}{message}"
        return encode_ascii({"type": "error", "error": {"type": self._type, "message": message}})

    @property
    def _type(self) -> str:
        """Anthropic's, by the status."""
        other = "api_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else INVALID
        return ANTHROPIC.get(self.status, other)


FORMS = (
    (re.compile(r"/v1/messages(/.*)?", re.DOTALL), Failure.anthropic),
    (re.compile(rf"{OLLAMA}.*", re.DOTALL), Failure.ollama),
    (re.compile(SYSTEM_ONE), Failure.system_one),
)
"""The APIs that have a form of errors of their own, by the paths of their routes."""


def failure(error: Exception) -> Failure:
    """The failure that a caller is told. An error that is none of ours is logged, and told as unexpected."""
    if isinstance(error, QuireError):
        status, kind = next((status, kind) for base, status, kind in TABLE if isinstance(error, base))
        return Failure(status, error.message, kind, error.param, error.code)
    if isinstance(error, sqlite3.OperationalError):
        logger.error("data_dir: %s", error)
        return Failure(503, f"Nothing can be kept now: {error}", SERVER, "data_dir", Overloaded.code)
    logger.error("a stream failed", exc_info=error)
    return Failure(500, UNEXPECTED, SERVER, None, "internal_error")


def http_failure(error: HTTPException) -> Failure:
    """The failure of an error that has an HTTP status."""
    kind = SERVER if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR else INVALID
    return Failure(error.status_code, str(error.detail), kind)


def stream_error(error: Exception) -> bytes:
    """An error inside a stream of OpenAI's chunks, as its last event."""
    return DATA + failure(error).openai() + END


def answer(path: str, told: Failure, headers: dict[str, str] | None = None) -> Response:
    """The response to a request for `path` that failed."""
    told = told.on(path)
    return Response(told.body(path), told.status, headers, "application/json")


async def _typed_error(request: Request, error: Exception) -> Response:
    told = failure(error)
    headers = {"Retry-After": RETRY_AFTER_SECONDS} if told.status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    if isinstance(error, RateLimited):
        headers = dict(error.headers)
    if isinstance(error, RequestQuarantined | ModelUnloadable):
        headers = {"x-should-retry": "false"}  # or OpenAI's SDK would send it twice more
    return answer(request.url.path, told, headers)


async def _validation_error(request: Request, error: Exception) -> Response:
    """Of a wrong query parameter; bodies are not FastAPI's to read."""
    assert isinstance(error, RequestValidationError)
    details = error.errors()
    message = "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in details)
    return answer(request.url.path, Failure(400, message, INVALID, str(details[0]["loc"][-1])))


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    absent = next((why for begin, why in ABSENT.items() if path.startswith(begin)), None)
    if error.status_code == HTTPStatus.NOT_FOUND and absent:
        told = Failure(404, f"This server has no {method} {path}: {absent}", INVALID, None, "unknown_url")
    elif error.status_code == HTTPStatus.NOT_FOUND:
        near = get_close_matches(path, request.app.openapi()["paths"], 1, 0.75)
        hint = f"did you mean {near[0]}?" if near else "/openapi.json lists what is served"
        told = Failure(404, f"Unknown request URL: {method} {path}; {hint}", INVALID, None, "unknown_url")
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        told = Failure(405, f"Not allowed to {method} on {path}", INVALID, None, "method_not_supported")
    else:
        told = http_failure(error)
    return answer(path, told, dict(error.headers or {}))


class UnexpectedErrorMiddleware:
    """ASGI middleware that answers unexpected exceptions with 500.

    Starlette's own handler for them runs outside all middleware: its answer would lack the CORS headers, and web pages
    of other origins could not read it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            if begun:
                raise
            record = scope.get("request_record")
            extra = {"request_id": None if record is None else record.request_id}
            logger.error("%s %s failed", scope["method"], one_line(scope["path"]), exc_info=error, extra=extra)
            told = Failure(500, UNEXPECTED, SERVER, None, "internal_error")
            await answer(scope["path"], told)(scope, receive, send)
