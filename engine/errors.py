"""Everything Quire raises on purpose, in one tree. server/errors.py holds the table from here to HTTP statuses.

QuireError
├── InvalidRequest            the caller's mistake: names the parameter
│   └── ContextLengthExceeded prompt longer than the model's context
├── ModelNotFound             a request names a model that is not served
├── RequestNotFound           no open request has that id
├── RateLimited               more than a tenant may ask for in a minute
├── Overloaded                no room now, later perhaps
│   └── QueueTimeout          did not start within the request's queue_timeout
├── SlowReader                whoever reads an answer is too far behind
├── Timeout                   not complete within the request's timeout
├── EngineError               the engine failed a request, or is gone
│   └── RequestQuarantined    the request ended several engines, and was given up
└── ConfigError               a bad flag, file or environment variable: names the key; ends the start
    └── ModelError            the model's files cannot be found, read or understood
"""

from __future__ import annotations

from collections.abc import Mapping


class QuireError(Exception):
    """Base of all; `str(error)` is the message for the user, without paths of ours or stack traces."""

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(QuireError):
    pass


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(QuireError):
    code = "model_not_found"


class RequestNotFound(QuireError):
    code = "request_not_found"


class RateLimited(QuireError):
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, headers: Mapping[str, str]) -> None:
        """`headers` say when to come back."""
        super().__init__(message)
        self.headers = headers


class Overloaded(QuireError):
    code = "overloaded"


class QueueTimeout(Overloaded):
    code = "queue_timeout"


class Timeout(QuireError):
    code = "timeout"


class SlowReader(QuireError):
    code = "slow_reader"


class EngineError(QuireError):
    code = "engine_error"


class RequestQuarantined(EngineError):
    code = "request_quarantined"


class ConfigError(QuireError):
    pass


class ModelError(ConfigError):
    def __init__(self, message: str) -> None:
        super().__init__(message, param="model")
