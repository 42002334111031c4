from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.engine.common.folder_reader import describe_validation_error
from quire.server.encoding import encode_ascii_json, encode_json
from quire.server.error_responses import INVALID_REQUEST_TYPE, ErrorInfo

CREATE, STEER = "response.create", "response.steer"
_STREAM_ID_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_MAX_SHOWN_BYTES = 50
_NULL = msgspec.Raw(b"null")
_NOT_OBJECT_MESSAGE = "Each message must be a JSON object, sent as text"
_POST_FIELDS = b',"type":null,"stream_id":null,"stream":true}'
"""End of a POST's body, which replaces an event's closing brace. Its fields override those of the event, because the
last of several fields with the same name counts.
"""


class _Envelope(msgspec.Struct):
    """Raw fields are decoded later, some of them only by the pipeline."""

    type: msgspec.Raw = _NULL
    stream_id: msgspec.Raw = _NULL
    previous_response_id: msgspec.Raw = _NULL
    stream: msgspec.Raw = _NULL
    background: msgspec.Raw = _NULL
    input: msgspec.Raw = _NULL


@dataclass(frozen=True, slots=True)
class CreateEvent:
    stream_id: str | None
    previous_id: str | None
    body: bytes


@dataclass(frozen=True, slots=True)
class SteerEvent:
    previous_id: str | None
    input: msgspec.Raw


class EventRefused(Exception):
    def __init__(self, info: ErrorInfo, stream_id: str | None = None) -> None:
        super().__init__(info.message)
        self.info = info
        self.stream_id = stream_id


def parse_client_event(message: bytes) -> CreateEvent | SteerEvent:
    """Raises EventRefused for an event that a WebSocket does not support. All other checks are left to the pipeline."""
    try:
        envelope = msgspec.json.decode(message, type=_Envelope)
    except msgspec.ValidationError as error:
        raise _refused(f"{_NOT_OBJECT_MESSAGE}: {describe_validation_error(error)}", None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _refused(f"{_NOT_OBJECT_MESSAGE}; this one is not valid JSON", None) from None
    stream_id = _read_stream_id(envelope.stream_id)
    kind = _text_or_none(envelope.type)
    previous_id = _text_or_none(envelope.previous_response_id)
    if kind == STEER:
        return SteerEvent(previous_id, envelope.input)
    if kind != CREATE:
        shown = bytes(memoryview(envelope.type)[:_MAX_SHOWN_BYTES]).decode(errors="replace")
        raise _refused(f"type must be {CREATE}, got {shown}", "type", stream_id)
    if bytes(envelope.stream) not in (b"null", b"true"):
        raise _refused("stream must be true or missing: a WebSocket always streams", "stream", stream_id)
    if bytes(envelope.background) not in (b"null", b"false"):
        raise _refused("background is not available over a WebSocket: use POST", "background", stream_id)
    return CreateEvent(stream_id, previous_id, message.rstrip()[:-1] + _POST_FIELDS)


def _read_stream_id(raw: msgspec.Raw) -> str | None:
    if bytes(raw) == b"null":
        return None
    stream_id = _text_or_none(raw)
    if stream_id is None or _STREAM_ID_PATTERN.fullmatch(stream_id) is None:
        message = "stream_id must be 1 to 256 letters, digits, underscores, hyphens and periods"
        raise _refused(message, "stream_id", code="invalid_stream_id")
    return stream_id


def _text_or_none(raw: msgspec.Raw) -> str | None:
    """Returns None for null and for values that are not texts. The pipeline refuses the latter."""
    try:
        return msgspec.json.decode(raw, type=str | None)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _refused(message: str, param: str | None, stream_id: str | None = None, code: str | None = None) -> EventRefused:
    return EventRefused(ErrorInfo(400, message, INVALID_REQUEST_TYPE, param, code), stream_id)


def encode_error_event(info: ErrorInfo, stream_id: str | None, headers: dict[str, str] | None = None) -> str:
    error: dict[str, Any] = {
        "type": info.error_type,
        "code": info.code,
        "message": info.message,
        "param": info.param,
        **({"headers": headers} if headers else {}),
    }
    lane = {} if stream_id is None else {"stream_id": stream_id}
    return encode_ascii_json({"type": "error", "status": info.status, **lane, "error": error}).decode()


def encode_steer_failure(event: SteerEvent) -> str:
    """OpenAI's event for a model that cannot be steered. Contains the refused input."""
    message = "Responses cannot be steered here: send response.create when the response has ended"
    error = {"type": INVALID_REQUEST_TYPE, "code": "steering_not_supported", "message": message}
    steer = {"previous_response_id": event.previous_id or "", "input": event.input}
    failure = {"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": steer}
    return encode_json(failure).decode()
