from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import MODEL_DEFAULT_FIELDS
from quire.server.config import ServerConfig
from quire.server.generation.response_writers.ollama import (
    OllamaChatWriter,
    OllamaWriter,
    model_loaded_body,
    ollama_embed_body,
    ollama_embeddings_body,
)
from quire.server.generation.vector_generation import VectorBodyWriter, VectorRequest
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaGenerationBody,
    OllamaMessage,
)
from quire.server.protocol.pooling import EmbeddingRequest
from quire.server.resolve.chat import resolve_chat_request
from quire.server.resolve.completions import resolve_completion_request
from quire.server.resolve.other_apis.chat_conversion import (
    FIELD_KEY,
    image_content_part,
    merge_user_turns,
    rename_fields_in_raised_errors,
)
from quire.server.resolve.parse import parse_body, validate_body
from quire.server.resolve.pooling_requests import build_embedding_request
from quire.server.resolve.resolved_generation import AnswerForm, ResolvedGeneration
from quire.server.resolve.tokenize_requests import JsonReply
from quire.server.served_model import ServedModel

_MODEL_DEFAULT_NAMES = tuple(each.name for each in MODEL_DEFAULT_FIELDS if each.name != "repetition_penalty")
OLLAMA_FIELD_NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in _MODEL_DEFAULT_NAMES},
    "stop": "options.stop",
    "reasoning_effort": "think",
    "response_format.json_schema.schema": "format",
    "response_format": "format",
}
CHAT_FORM = AnswerForm(OllamaChatWriter, "chatcmpl-", OLLAMA_FIELD_NAMES)
GENERATE_FORM = AnswerForm(OllamaWriter, "chatcmpl-", {**OLLAMA_FIELD_NAMES, "messages": "prompt"})
GENERATE_RAW_FORM = AnswerForm(OllamaWriter, "cmpl-", OLLAMA_FIELD_NAMES)


def resolve_ollama_chat(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> ResolvedGeneration | JsonReply:
    """Without messages, Ollama loads the model; here it is loaded already."""
    body = parse_body(body_bytes, OllamaChatRequest)
    name = model.resolve_model_name(model_name_without_latest_tag(body.model, model))
    if not body.messages:
        return JsonReply(model_loaded_body(name, "message"), {})
    return _resolve_chat_turns(body, turns_from_ollama(body.messages), body.tools, name, model, config)


def resolve_ollama_generate(
    body_bytes: bytes, model: ServedModel, config: ServerConfig
) -> ResolvedGeneration | JsonReply:
    """As in Ollama, the prompt is a chat's only user message. With raw or suffix, it is a completion's prompt."""
    body = parse_body(body_bytes, OllamaGenerateRequest)
    name = model.resolve_model_name(model_name_without_latest_tag(body.model, model))
    if body.images and (body.raw or body.suffix):
        raise InvalidRequest("images: not available with raw or suffix, which do not use the template", param="images")
    if not body.prompt and not body.images:
        return JsonReply(model_loaded_body(name, "response"), {})
    if not body.raw and not body.suffix:
        turns = [{"role": "system", "content": content_with_images(body.system, (), "")}] if body.system else []
        content = content_with_images(body.prompt, body.images, "images")
        return _resolve_chat_turns(body, [*turns, {"role": "user", "content": content}], (), name, model, config)
    with rename_fields_in_raised_errors(OLLAMA_FIELD_NAMES):
        fields = {**sampling_fields(body, model), "prompt": body.prompt, "model": name}
        if body.suffix:
            fields["suffix"] = body.suffix
        request, ignored = validate_body(fields, CompletionRequest), body.check_params_and_list_ignored()
        return resolve_completion_request(request, model, config, GENERATE_RAW_FORM, ignored=ignored)


def _resolve_chat_turns(
    body: OllamaGenerationBody,
    turns: list[dict[str, Any]],
    tools: Sequence[Any],
    name: str,
    model: ServedModel,
    config: ServerConfig,
) -> ResolvedGeneration:
    form = CHAT_FORM if isinstance(body, OllamaChatRequest) else GENERATE_FORM
    with rename_fields_in_raised_errors(form.field_names) as caller_fields:
        fields = {
            **sampling_fields(body, model),
            "model": name,
            "messages": merge_user_turns(turns, caller_fields),
            "tools": [tool.to_template_tool() for tool in tools],
            **thinking_fields(body, model),
        }
        return resolve_chat_request(
            validate_body(fields, ChatRequest),
            model,
            config,
            form,
            ignored=body.check_params_and_list_ignored(),
            caller_fields=caller_fields,
        )


def model_name_without_latest_tag(requested_name: str | None, model: ServedModel) -> str | None:
    """Ollama's clients add the tag `latest`."""
    return None if requested_name is None else strip_latest_tag(requested_name, (*model.names, *model.adapters))


def strip_latest_tag(requested_name: str, names: Collection[str]) -> str:
    return requested_name if requested_name in names else requested_name.removesuffix(":latest")


def turns_from_ollama(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """A tool result without an id belongs to the first open call."""
    turns: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for index, message in enumerate(messages):
        content = content_with_images(message.content, message.images, f"messages[{index}].images")
        turn: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            turn["reasoning"] = message.thinking
        if message.tool_calls:
            calls = [(call.id or f"call_{index}_{i}", call.function) for i, call in enumerate(message.tool_calls)]
            open_calls = [id for id, _ in calls]
            turn["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": one.name, "arguments": json.dumps(one.arguments)}}
                for id, one in calls
            ]
        if message.role == "tool":
            turn["tool_call_id"] = message.tool_call_id or (open_calls.pop(0) if open_calls else "call")
        turns.append({**turn, FIELD_KEY: f"messages[{index}]"})
    return turns


def content_with_images(text: str, images: Sequence[str], field: str) -> list[dict[str, Any]]:
    """Images (base64) precede the text, as in Ollama."""
    shown = [image_content_part(f"data:;base64,{image}", f"{field}[{index}]") for index, image in enumerate(images)]
    return [*shown, {"type": "text", "text": text}]


def sampling_fields(body: OllamaGenerationBody, model: ServedModel) -> dict[str, Any]:
    """None stands for the model's default."""
    options = body.options
    most = options.num_predict
    fields: dict[str, Any] = {
        "max_tokens": -1 if most is None or most < 0 else most,
        **{name: getattr(options, name) for name in _MODEL_DEFAULT_NAMES},
        "seed": options.seed,
        "stop": options.stop,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "stream": body.stream,
    }
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": body.format}}
    return fields


def thinking_fields(body: OllamaGenerationBody, model: ServedModel) -> dict[str, Any]:
    think, switch = body.think, model.chat_formats.thinking_switch
    if think is None:
        return {}
    fields: dict[str, Any] = {"include_reasoning": think is not False}
    effort = think if isinstance(think, str) else None
    fields["chat_template_kwargs"] = switch.thinking_variables(think is not False, effort)
    if effort is not None and switch.effort_words:
        fields["reasoning_effort"] = think
    return fields


def resolve_ollama_embed(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> VectorRequest:
    body = parse_body(body_bytes, OllamaEmbedRequest)
    fields = {"input": body.input, "dimensions": body.dimensions}
    if body.truncate:
        fields["truncate_prompt_tokens"] = -1
    return _resolve_vectors(body.model, fields, ollama_embed_body, model, config)


def resolve_ollama_embeddings(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> VectorRequest:
    body = parse_body(body_bytes, OllamaEmbeddingsRequest)
    fields = {"input": body.prompt, "truncate_prompt_tokens": -1}
    return _resolve_vectors(body.model, fields, ollama_embeddings_body, model, config)


def _resolve_vectors(
    requested_name: str | None,
    fields: dict[str, Any],
    write_body: VectorBodyWriter,
    model: ServedModel,
    config: ServerConfig,
) -> VectorRequest:
    body = validate_body({**fields, "model": model_name_without_latest_tag(requested_name, model)}, EmbeddingRequest)
    return build_embedding_request(body, write_body, model, config)
