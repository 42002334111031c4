"""One table from exceptions to the error body of each API, before a stream and inside it."""

from __future__ import annotations

import logging
import re
import sqlite3
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.errors import (
    Conflict,
    ContextLengthExceeded,
    EngineError,
    EngineGone,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    QuireError,
    RateLimited,
    RequestNotFound,
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
SYSTEM_ONE = "/v1/systemone"
"""The route of TypeSafe's API."""
OLLAMA = "/api/"
"""The beginning of the paths of Ollama's API."""
RETRY_AFTER_SECONDS = "1"
UNEXPECTED = "The server had an error while processing your request. The log says more"


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
