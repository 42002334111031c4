"""Errors raised on purpose. server/error_responses.py maps them to HTTP statuses."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class QuireError(Exception):
    """An error whose text clients see, so it must not contain stack traces or server paths."""

    code: str | None = None
    """`code` of OpenAI's error object."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """`param`: name of the wrong field or setting."""
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(QuireError):
    pass


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class PreviousResponseNotFound(InvalidRequest):
    """The previous response is unknown. OpenAI's clients then resend the whole conversation."""

    code = "previous_response_not_found"


class AdapterError(InvalidRequest):
    """The adapter is unreadable, or does not fit the model."""

    code = "invalid_adapter"


class ModelNotFound(QuireError):
    code = "model_not_found"


class RequestNotFound(QuireError):
    code = "request_not_found"


class Conflict(QuireError):
    """Stored content differs from the request's."""

    code = "conflict"


class RateLimited(QuireError):
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.headers = headers


class Overloaded(QuireError):
    """There is no room now; a later try may succeed."""

    code = "overloaded"


class ModelNotLoadable(Overloaded):
    """The model cannot be loaded because its files are wrong, so clients should not retry soon."""

    code = "model_unloadable"


class QueueTimeout(Overloaded):
    code = "queue_timeout"


class Timeout(QuireError):
    code = "timeout"


class SlowReader(QuireError):
    code = "slow_reader"


class EngineError(QuireError):
    code = "engine_error"


class EngineGone(EngineError):
    """Only another server, or another load, can answer."""


class RequestQuarantined(EngineError):
    """The request ended several engine processes."""

    code = "request_quarantined"


class ConfigError(QuireError, ValueError):
    """A wrong setting. It is a ValueError, as programs that create an LLM expect. Code that handles a library's
    ValueErrors must re-raise ConfigErrors.
    """


class ModelError(ConfigError):
    """The model's files cannot be found, read or understood."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model")


class HubUnreachable(ModelError):
    """The model is not on this machine, and its hub does not answer."""


def may_succeed_later(error: Exception) -> bool:
    """True if the same request may succeed later or on another server."""
    return isinstance(error, EngineGone | Overloaded) and not isinstance(error, QueueTimeout | ModelNotLoadable)


def refuse_setting_if(param: str, *reasons: str | bool | None) -> None:
    """Raise ConfigError with the first truthy reason, if any."""
    for why in reasons:
        if why:
            raise ConfigError(f"{param}: {why}", param=param)


def check_task(task: str, tasks: Collection[str]) -> None:
    """Raises InvalidRequest."""
    if task not in tasks:
        hint = "; with pooling_type='last' it computes embeddings" if task == "embed" and "generate" in tasks else ""
        raise InvalidRequest(f"the model serves {' and '.join(tasks)}, not {task}{hint}", param="model")
