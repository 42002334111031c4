"""The grammar that a request asks for, in one of many ways."""

from __future__ import annotations

from typing import Any

from quire.engine.errors import InvalidRequest
from quire.engine.text.structured import CLOSING, WAYS, Structured, asked_ways, structured_grammar
from quire.server.config import ServerConfig
from quire.server.protocol.bounds import MAX_CHOICES
from quire.server.protocol.common import GenerationBody
from quire.server.resolve.checks import check_text


def asked_grammar(body: GenerationBody, config: ServerConfig) -> tuple[str, Structured] | None:
    """The parameter that asks, and the grammar it asks for. Raises InvalidRequest naming the parameter."""
    found: list[tuple[str, str, Any]] = []
    if body.response_format is not None:
        found += [("response_format", *one) for one in _response_format(body.response_format)]
    if body.structured_outputs is not None:
        found += [("structured_outputs", *one) for one in asked_ways(body.structured_outputs)]
    for way in WAYS:
        param = f"guided_{way}"
        value = getattr(body, param, None)
        if value is not None:
            found.append((param, way, value))
    if not found:
        return None
    if len(found) > 1:
        all_asked = " and ".join(f"{param} ({way})" for param, way, _ in found)
        raise InvalidRequest(f"Only one structured output can be asked for, got {all_asked}", param=found[1][0])
    param, way, value = found[0]
    try:
        close = config.disable_additional_properties or (body.structured_outputs or {}).get(CLOSING) is True
        structured = _grammar(way, value, close=close)
    except InvalidRequest as error:
        raise InvalidRequest(f"{param}: {error.message}", param=param) from error
    check_text(structured.grammar.text, param)
    return param, structured


def _response_format(given: dict[str, Any]) -> list[tuple[str, Any]]:
    kind = given.get("type")
    if kind == "text":
        return []
    if kind == "json_object":  # with a schema as llama.cpp's clients send it, or TGI's (huggingface_hub)
        schema = given.get("schema", given.get("value"))
        return [("json_object", True) if schema is None else ("json", schema)]
    if kind == "json_schema":
        inner = given.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if schema is None:
            raise InvalidRequest("response_format.json_schema.schema is missing", param="response_format")
        return [("json", schema)]
    raise InvalidRequest(
        f"response_format.type must be text, json_object or json_schema, got {kind!r}", param="response_format"
    )


def _grammar(way: str, value: Any, *, close: bool) -> Structured:
    if way == "choice" and isinstance(value, list) and len(value) > MAX_CHOICES:
        raise InvalidRequest(f"choice takes at most {MAX_CHOICES} strings, got {len(value)}")
    return structured_grammar(way, value, close=close)
