"""Error handlers that need FastAPI. Processes that must start quickly import error_responses.py instead."""

from __future__ import annotations

import sqlite3
from difflib import get_close_matches
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.common.errors import ModelNotLoadable, QuireError, RateLimited, RequestQuarantined
from quire.server.error_responses import (
    INVALID_REQUEST_TYPE,
    RETRY_AFTER_SECONDS,
    ErrorInfo,
    error_info,
    error_response,
    http_error_info,
)

UNSUPPORTED_PATHS = {
    "/v1/audio/": "its models read text and images and write text: no sound",
    "/v1/images/": "its models generate text, not images",
    "/v1/videos": "its models write text: no films",
    "/v1/realtime": "its models read text and images and write text: no sound",
    "/v1/moderations": "it judges no texts; /v1/decisions asks a model about one",
    "/v1/fine_tuning/": "it trains nothing; an adapter that was trained elsewhere is loaded by /v1/load_lora_adapter",
    "/v1/assistants": "/v1/responses with /v1/conversations is OpenAI's replacement for it",
    "/v1/threads": "/v1/responses with /v1/conversations is OpenAI's replacement for it",
    "/v1/vector_stores": "it keeps no vectors; /v1/embeddings makes them",
    "/v1/uploads": "a file is sent whole, to /v1/files",
    "/v1/messages/batches": "use /v1/batches for batches",
    "/api/copy": "`quire serve --served-model-name` gives a model another name",
    "/api/create": "models cannot be created here; `quire serve MODEL` serves one",
    "/api/delete": "`quire rm MODEL` deletes one",
    "/api/push": "it uploads no models",
    "/api/blobs": "it accepts no model uploads",
}
"""For each path prefix, the reason why the API is not supported, or an alternative."""


def install_error_handlers(app: FastAPI) -> None:
    """Handles typed errors. UnexpectedErrorMiddleware answers all other exceptions."""
    app.add_exception_handler(QuireError, _handle_typed_error)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(sqlite3.OperationalError, _handle_typed_error)


async def _handle_typed_error(request: Request, error: Exception) -> Response:
    error_body = error_info(error)
    headers = {"Retry-After": RETRY_AFTER_SECONDS} if error_body.status == HTTPStatus.SERVICE_UNAVAILABLE else {}
    if isinstance(error, RateLimited):
        headers = dict(error.headers)
    if isinstance(error, RequestQuarantined | ModelNotLoadable):
        headers = {"x-should-retry": "false"}  # OpenAI's SDK retries twice otherwise
    return error_response(request.url.path, error_body, headers)


async def _handle_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    details = error.errors()
    message = "; ".join(f"{detail['loc'][-1]}: {detail['msg']}" for detail in details)
    return error_response(request.url.path, ErrorInfo(400, message, INVALID_REQUEST_TYPE, str(details[0]["loc"][-1])))


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    unsupported = next((reason for prefix, reason in UNSUPPORTED_PATHS.items() if path.startswith(prefix)), None)
    if error.status_code == HTTPStatus.NOT_FOUND and unsupported:
        error_body = ErrorInfo(
            404, f"This server has no {method} {path}: {unsupported}", INVALID_REQUEST_TYPE, None, "unknown_url"
        )
    elif error.status_code == HTTPStatus.NOT_FOUND:
        similar_paths = get_close_matches(path, request.app.openapi()["paths"], 1, 0.75)
        hint = f"did you mean {similar_paths[0]}?" if similar_paths else "/openapi.json lists all routes"
        error_body = ErrorInfo(
            404, f"Unknown request URL: {method} {path}; {hint}", INVALID_REQUEST_TYPE, None, "unknown_url"
        )
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        error_body = ErrorInfo(
            405, f"Not allowed to {method} on {path}", INVALID_REQUEST_TYPE, None, "method_not_supported"
        )
    else:
        error_body = http_error_info(error)
    return error_response(path, error_body, dict(error.headers or {}))
