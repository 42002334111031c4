"""Aliases of a model, with their own system message and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import ValidationError

from quire.engine.common.errors import ConfigError, InvalidRequest
from quire.engine.common.request_params import SETTING_FIELDS, SamplingParams
from quire.server.access.body_reader import BodyBuffer
from quire.server.error_responses import COMPLETION_PATH, INFILL_PATH
from quire.server.protocol.chat import ChatRequest

_SAMPLING_PARAMETERS = tuple(each.name for each in SETTING_FIELDS if each.name != "max_tokens")
PRESET_PARAMETERS = (
    *_SAMPLING_PARAMETERS,
    "max_tokens",
    "stop",
    "chat_template_kwargs",
    "reasoning_effort",
)
_OLLAMA_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
_COMPLETION_PARAMETERS = (*_SAMPLING_PARAMETERS, "max_tokens", "stop")
_LLAMA_CPP_NAMES = {name: name for name in _COMPLETION_PARAMETERS} | {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
}
_MAX_TOKENS_NAMES = ("max_tokens", "max_completion_tokens", "n_predict")
_FIELDS_BY_PATH: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "/v1/chat/completions": ("messages", {name: name for name in PRESET_PARAMETERS}),
    "/v1/completions": ("", {name: name for name in _COMPLETION_PARAMETERS}),
    COMPLETION_PATH: ("", _LLAMA_CPP_NAMES),
    INFILL_PATH: ("", _LLAMA_CPP_NAMES),
    "/v1/messages": (
        "system",
        {name: name for name in ("temperature", "top_p", "top_k", "max_tokens", "chat_template_kwargs")}
        | {"stop": "stop_sequences"},
    ),
    "/v1/messages/count_tokens": ("system", {}),
    "/v1/responses": (
        "instructions",
        {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_output_tokens"},
    ),
    "/api/chat": ("messages", {}),
    "/api/generate": ("system", {}),
    "/tokenize": ("messages", {"chat_template_kwargs": "chat_template_kwargs"}),
}


@dataclass(frozen=True, slots=True)
class ModelPreset:
    system: str | None
    parameters: Mapping[str, Any]


def parse_preset(where: str, system: object, parameters: object) -> ModelPreset:
    """`where`: prefix of errors. Raises ConfigError."""
    if system is not None and (not isinstance(system, str) or not system.strip()):
        raise ConfigError(f"{where}: system: must be a text")
    if not isinstance(parameters, dict):
        raise ConfigError(f"{where}: parameters: must be a table, such as {{temperature = 0.2}}")
    if unknown := sorted(parameters.keys() - set(PRESET_PARAMETERS)):
        raise ConfigError(f"{where}: parameters.{unknown[0]}: there are {', '.join(PRESET_PARAMETERS)}")
    try:
        ChatRequest(messages=[{"role": "user", "content": ""}], **parameters)
        SamplingParams(**{name: parameters[name] for name in _SAMPLING_PARAMETERS if name in parameters})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: parameters.{place}: {first['msg']}, got {first['input']!r}") from None
    except InvalidRequest as error:
        raise ConfigError(f"{where}: parameters: {error.message}") from None
    return ModelPreset(system, parameters)


def apply_preset(preset: ModelPreset, path: str, body: BodyBuffer) -> None:
    """Adds the preset's system message and parameters where the body has none."""
    path_fields = _FIELDS_BY_PATH.get(path)
    if path_fields is None:
        return
    try:
        content = msgspec.json.decode(b"".join(body.chunks))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return  # the route reports this error
    if not isinstance(content, dict):
        return
    field, names = path_fields
    if preset.system is not None:
        _fill_system_message(content, field, preset.system)
    if path.startswith("/api/"):
        options = content.setdefault("options", {})
        if isinstance(options, dict):
            for name in _COMPLETION_PARAMETERS:
                _fill_field(options, _OLLAMA_NAMES.get(name, name), preset.parameters.get(name))
    if any(content.get(name) is not None for name in _MAX_TOKENS_NAMES):
        names = {name: field_name for name, field_name in names.items() if name != "max_tokens"}
    for name, field_name in names.items():
        _fill_field(content, field_name, preset.parameters.get(name))
    body.chunks[:] = [msgspec.json.encode(content)]
    body.received_bytes = len(body.chunks[0])


def _fill_system_message(content: dict[str, Any], field: str, system: str) -> None:
    if field != "messages":
        if field:
            _fill_field(content, field, system)
        return
    messages = content.get("messages")
    if not isinstance(messages, list) or not messages:
        return
    if not any(isinstance(each, dict) and each.get("role") in ("system", "developer") for each in messages):
        messages.insert(0, {"role": "system", "content": system})


def _fill_field(content: dict[str, Any], name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, Mapping) and isinstance(content.get(name), dict):
        content[name] = {**value, **content[name]}
    elif content.get(name) is None or content[name] == "":
        content[name] = value
