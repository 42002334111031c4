"""One table from exceptions to OpenAI's error body, before a stream and inside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from difflib import get_close_matches
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.errors import (
    EngineError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    QuireError,
    RateLimited,
    RequestNotFound,
    RequestQuarantined,
    Timeout,
)
from quire.server.encoding import DATA, END, encode_ascii

logger = logging.getLogger("quire.server")

INVALID, SERVER = "invalid_request_error", "server_error"
TABLE: tuple[tuple[type[QuireError], int, str], ...] = (
    (InvalidRequest, 400, INVALID),
    (ModelNotFound, 404, "not_found_error"),
    (RequestNotFound, 404, "not_found_error"),
    (RateLimited, 429, "rate_limit_error"),
    (Overloaded, 503, SERVER),
    (Timeout, 408, SERVER),
    (EngineError, 500, SERVER),
    (QuireError, 500, SERVER),
)
"""Base class, HTTP status and OpenAI's error type; the first matching row counts."""
RETRY_AFTER_SECONDS = "1"
MAX_DETAILS = 10
UNEXPECTED = "The server had an error while processing your request. The log says more"


def install(app: FastAPI) -> None:
    """Answer the typed errors that routes raise with an OpenAI error body. UnexpectedErrorMiddleware answers others."""
    app.add_exception_handler(QuireError, _quire_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)


def stream_error(error: Exception) -> bytes:
    """An error inside a stream, as its last event."""
    if isinstance(error, QuireError):
        _, kind = _row(error)
        body = error_body(error.message, kind, error.param, error.code)
    else:
        logger.error("a stream failed", exc_info=error)
        body = error_body(UNEXPECTED, SERVER, None, "internal_error")
    return DATA + body + END


def error_body(message: str, kind: str, param: str | None, code: str | None) -> bytes:
    # ASCII, because a message may quote half a surrogate pair from the request, which UTF-8 cannot encode.
    return encode_ascii({"error": {"message": message, "type": kind, "param": param, "code": code}})


def _answer(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")


def _row(error: QuireError) -> tuple[int, str]:
    return next((status, kind) for base, status, kind in TABLE if isinstance(error, base))


async def _quire_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuireError)
    status, kind = _row(error)
    headers = {"Retry-After": RETRY_AFTER_SECONDS} if status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    if isinstance(error, RateLimited):
        headers = dict(error.headers)
    if isinstance(error, RequestQuarantined):
        headers = {"x-should-retry": "false"}  # or OpenAI's SDK would send it twice more
    return _answer(status, error_body(error.message, kind, error.param, error.code), headers)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    details = error.errors()
    first = details[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        message, param = f"The body is not valid JSON: {reason} at character {first['loc'][-1]}", None
    elif tuple(first["loc"]) == ("body",):
        message, param = "The body must be a JSON object, sent with the header Content-Type: application/json", None
    else:
        param = _param(first["loc"])
        message = "; ".join(f"{_where(one['loc'])}: {one['msg']}" for one in _without_doubles(details)[:MAX_DETAILS])
    return _answer(400, error_body(message, INVALID, param, None))


def _without_doubles(details: Sequence[Any]) -> list[Any]:
    """One detail per place: pydantic reports each member of a union of types."""
    by_place = {_where(one["loc"]): one for one in reversed(details)}
    return list(reversed(by_place.values()))


def _param(place: Sequence[str | int]) -> str | None:
    """The top-level parameter of ("body", "messages", 0, "role") or ("query", "seconds")."""
    return str(place[1]) if len(place) > 1 else None


def _where(place: Sequence[str | int]) -> str:
    """messages[0].role; the names of union members that pydantic puts in are left out."""
    text = ""
    for part in place[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float"):
            text += f".{part}" if text else part
    return text or "body"


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == HTTPStatus.NOT_FOUND:
        near = get_close_matches(path, request.app.openapi()["paths"], 1, 0.75)
        hint = f"did you mean {near[0]}?" if near else "/openapi.json lists what is served"
        body = error_body(f"Unknown request URL: {method} {path}; {hint}", INVALID, None, "unknown_url")
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        body = error_body(f"Not allowed to {method} on {path}", INVALID, None, "method_not_supported")
    else:
        kind = SERVER if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR else INVALID
        unreadable = "error parsing the body" in str(error.detail)  # FastAPI's words for bytes that are no text
        detail = "The body must be JSON in UTF-8, not compressed" if unreadable else str(error.detail)
        body = error_body(detail, kind, None, None)
    return _answer(error.status_code, body, dict(error.headers or {}))


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
            logger.error("%s %s failed", scope.get("method"), scope.get("path"), exc_info=error, extra=extra)
            await _answer(500, error_body(UNEXPECTED, SERVER, None, "internal_error"))(scope, receive, send)
