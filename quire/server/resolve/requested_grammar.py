from __future__ import annotations

from typing import Any

from quire.engine.common.errors import InvalidRequest
from quire.engine.text.structured_outputs import (
    CLOSE_OBJECTS_KEY,
    CONSTRAINT_KINDS,
    GrammarWithOpenObjects,
    constraint_grammar,
    requested_constraints,
)
from quire.engine.text.tokenizer import Tokenizer
from quire.server.config import ServerConfig
from quire.server.protocol.field_limits import MAX_STRUCTURED_CHOICES
from quire.server.protocol.request_bodies import GenerationBody
from quire.server.resolve.checks import check_no_surrogates


def requested_grammar(
    body: GenerationBody, config: ServerConfig, tokenizer: Tokenizer
) -> tuple[str, GrammarWithOpenObjects] | None:
    requests: list[tuple[str, str, Any]] = []
    if body.response_format is not None:
        requests += [("response_format", *one) for one in _response_format_constraints(body.response_format)]
    if body.structured_outputs is not None:
        requests += [("structured_outputs", *one) for one in requested_constraints(body.structured_outputs)]
    for kind in CONSTRAINT_KINDS:
        param = f"guided_{kind}"
        value = getattr(body, param, None)
        if value is not None:
            requests.append((param, kind, value))
    if not requests:
        return None
    if len(requests) > 1:
        all_asked = " and ".join(f"{param} ({kind})" for param, kind, _ in requests)
        raise InvalidRequest(f"Only one structured output can be requested, got {all_asked}", param=requests[1][0])
    param, kind, value = requests[0]
    try:
        close = config.disable_additional_properties or (body.structured_outputs or {}).get(CLOSE_OBJECTS_KEY) is True
        if kind == "structural_tag" and getattr(body, "tools", None) and getattr(body, "tool_choice", None) != "none":
            raise InvalidRequest("a structural tag cannot be combined with tools: write the tools as tags")
        structured = _build_structured_grammar(kind, value, close=close, tokenizer=tokenizer)
    except InvalidRequest as error:
        raise InvalidRequest(f"{param}: {error.message}", param=param) from error
    check_no_surrogates(structured.grammar.text, param)
    return param, structured


def _response_format_constraints(response_format: dict[str, Any]) -> list[tuple[str, Any]]:
    kind = response_format.get("type")
    if kind == "text":
        return []
    if kind == "json_object":  # llama.cpp's clients and TGI's (huggingface_hub) send a schema
        schema = response_format.get("schema", response_format.get("value"))
        return [("json_object", True) if schema is None else ("json", schema)]
    if kind == "json_schema":
        inner = response_format.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if schema is None:
            raise InvalidRequest("response_format.json_schema.schema is missing", param="response_format")
        return [("json", schema)]
    if kind == "structural_tag":
        return [("structural_tag", response_format)]
    raise InvalidRequest(
        f"response_format.type must be text, json_object, json_schema or structural_tag, got {kind!r}",
        param="response_format",
    )


def _build_structured_grammar(kind: str, value: Any, *, close: bool, tokenizer: Tokenizer) -> GrammarWithOpenObjects:
    if kind == "choice" and isinstance(value, list) and len(value) > MAX_STRUCTURED_CHOICES:
        raise InvalidRequest(f"choice takes at most {MAX_STRUCTURED_CHOICES} strings, got {len(value)}")
    return constraint_grammar(kind, value, close=close, tokenizer=tokenizer)
