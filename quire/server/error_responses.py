"""Maps exceptions to each API's error body, also within streams."""

from __future__ import annotations

import logging
import re
import sqlite3
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.responses import Response

from quire.engine.common.errors import (
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
from quire.server.encoding import EVENT_END, EVENT_PREFIX, encode_ascii_json

logger = logging.getLogger("quire.server")

INVALID_REQUEST_TYPE, SERVER_ERROR_TYPE = "invalid_request_error", "server_error"
ERROR_TABLE: tuple[tuple[type[QuireError], int, str], ...] = (
    (InvalidRequest, 400, INVALID_REQUEST_TYPE),
    (ModelNotFound, 404, "not_found_error"),
    (RequestNotFound, 404, "not_found_error"),
    (Conflict, 409, INVALID_REQUEST_TYPE),
    (RateLimited, 429, "rate_limit_error"),
    (Overloaded, 503, SERVER_ERROR_TYPE),
    (Timeout, 408, SERVER_ERROR_TYPE),
    (EngineGone, 503, SERVER_ERROR_TYPE),
    (EngineError, 500, SERVER_ERROR_TYPE),
    (QuireError, 500, SERVER_ERROR_TYPE),
)
"""The first matching row is used."""
ANTHROPIC_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Other statuses have invalid_request_error below 500, and api_error from 500."""
LLAMA_CPP_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    503: "unavailable_error",
}
"""Other statuses have OpenAI's error types."""
SYSTEM_ONE_PATH = "/v1/systemone"
COMPLETION_PATH = "/completion"
INFILL_PATH = "/infill"
SLOTS_PATH = "/slots"
OLLAMA_PREFIX = "/api/"
RETRY_AFTER_SECONDS = "1"
UNEXPECTED_MESSAGE = "The server had an error while processing your request. The log has details"


_TOKEN_COUNTS = re.compile(r"length is (\d+) tokens, but \w+ came to (?:about )?(\d+) tokens")


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    status: int
    message: str
    error_type: str
    param: str | None = None
    code: str | None = None

    def encode_body(self, path: str) -> bytes:
        return next((form for paths, form in ERROR_ENCODERS if paths.fullmatch(path)), ErrorInfo.encode_openai)(self)

    def with_api_status(self, path: str) -> ErrorInfo:
        return replace(self, status=422) if path == SYSTEM_ONE_PATH and self.status == HTTPStatus.BAD_REQUEST else self

    def encode_openai(self) -> bytes:
        # ASCII: messages may quote an unpaired surrogate, which UTF-8 cannot encode.
        fields = {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}
        return encode_ascii_json({"error": fields})

    def encode_ollama(self) -> bytes:
        return encode_ascii_json({"error": self.message})

    def encode_system_one(self) -> bytes:
        """Has the `detail` of FastAPI's errors."""
        if self.status == HTTPStatus.UNPROCESSABLE_ENTITY:
            place = ["body"] if self.param is None else ["body", self.param]
            return encode_ascii_json({"detail": [{"loc": place, "msg": self.message, "type": "value_error"}]})
        return encode_ascii_json({"detail": {"error_type": self._anthropic_type, "message": self.message}})

    def encode_anthropic(self) -> bytes:
        """Names the parameter in the message, because there is no field for it."""
        message = self.message if self.param is None or self.param in self.message else f"{self.param}: {self.message}"
        if self.code == ContextLengthExceeded.code:  # Claude Code reads these words and both numbers, and then compacts
            token_counts = _TOKEN_COUNTS.search(message)
            sizes = f"{token_counts[2]} tokens > {token_counts[1]} maximum. " if token_counts else ""
            message = f"prompt is too long: {sizes}{message}"
        return encode_ascii_json({"type": "error", "error": {"type": self._anthropic_type, "message": message}})

    def encode_llama_cpp(self) -> bytes:
        fields: dict[str, object] = {
            "code": self.status,
            "message": self.message,
            "type": LLAMA_CPP_ERROR_TYPES.get(self.status, self.error_type),
        }
        if self.code == ContextLengthExceeded.code:  # llama.vscode reads both numbers
            fields["type"] = "exceed_context_size_error"
            if token_counts := _TOKEN_COUNTS.search(self.message):
                fields |= {"n_prompt_tokens": int(token_counts[2]), "n_ctx": int(token_counts[1])}
        return encode_ascii_json({"error": fields})

    @property
    def _anthropic_type(self) -> str:
        other = "api_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else INVALID_REQUEST_TYPE
        return ANTHROPIC_ERROR_TYPES.get(self.status, other)


ERROR_ENCODERS = (
    (re.compile(r"/v1/messages(/.*)?", re.DOTALL), ErrorInfo.encode_anthropic),
    (re.compile(rf"{OLLAMA_PREFIX}.*", re.DOTALL), ErrorInfo.encode_ollama),
    (re.compile(SYSTEM_ONE_PATH), ErrorInfo.encode_system_one),
    (re.compile(f"{COMPLETION_PATH}|{INFILL_PATH}|{SLOTS_PATH}"), ErrorInfo.encode_llama_cpp),
)
"""Other paths use OpenAI's form."""


def error_info(error: Exception) -> ErrorInfo:
    """Logs exceptions other than QuireError."""
    if isinstance(error, QuireError):
        status, kind = next((status, kind) for base, status, kind in ERROR_TABLE if isinstance(error, base))
        return ErrorInfo(status, error.message, kind, error.param, error.code)
    if isinstance(error, sqlite3.OperationalError):
        logger.error("data_dir: %s", error)
        return ErrorInfo(503, f"Nothing can be saved now: {error}", SERVER_ERROR_TYPE, "data_dir", Overloaded.code)
    logger.error("a stream failed", exc_info=error)
    return ErrorInfo(500, UNEXPECTED_MESSAGE, SERVER_ERROR_TYPE, None, "internal_error")


def http_error_info(error: HTTPException) -> ErrorInfo:
    kind = SERVER_ERROR_TYPE if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR else INVALID_REQUEST_TYPE
    return ErrorInfo(error.status_code, str(error.detail), kind)


def encode_openai_stream_error(error: Exception) -> bytes:
    return EVENT_PREFIX + error_info(error).encode_openai() + EVENT_END


def error_response(path: str, info: ErrorInfo, headers: dict[str, str] | None = None) -> Response:
    info = info.with_api_status(path)
    return Response(info.encode_body(path), info.status, headers, "application/json")
