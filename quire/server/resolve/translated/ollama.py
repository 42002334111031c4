"""From Ollama's requests to a chat, a completion or vectors, and to the spec of these."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from quire.engine.errors import InvalidRequest
from quire.server.config import ServerConfig
from quire.server.generation.answers.ollama import OllamaChatWriter, OllamaWriter, embed, embedding, loaded
from quire.server.generation.vectors import VectorAnswer, VectorSpec
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.ollama import (
    OllamaBody,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaMessage,
)
from quire.server.protocol.pooling import EmbeddingRequest
from quire.server.resolve.chat import chat_call
from quire.server.resolve.common import Resolved
from quire.server.resolve.completions import completion_call
from quire.server.resolve.parse import parse, validated
from quire.server.resolve.pooling import embedding_spec
from quire.server.resolve.tokenize import Reply
from quire.server.resolve.translated.as_chat import FIELD, image_part, in_own_words, named_by_caller, placed
from quire.server.served_model import ServedModel

NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "temperature": "options.temperature",
    "top_p": "options.top_p",
    "top_k": "options.top_k",
    "min_p": "options.min_p",
    "stop": "options.stop",
    "reasoning_effort": "think",
    "response_format.json_schema.schema": "format",
    "response_format": "format",
}
"""Names of a chat's fields, and what Ollama calls them."""


def resolve_chat(given: bytes, model: ServedModel, config: ServerConfig) -> Resolved | Reply:
    """A chat without messages is Ollama's way to load a model, which is loaded here already. Raises ModelNotFound, and
    InvalidRequest naming the parameter."""
    body = parse(given, OllamaChatRequest)
    name = model.answer_name(plain_name(body.model, model))
    if not body.messages:
        return Reply(loaded(name, "message"), {})
    return _chat(body, turns_of(body.messages), body.tools, name, model, config)


def resolve_generate(given: bytes, model: ServedModel, config: ServerConfig) -> Resolved | Reply:
    """A chat whose only message is the prompt, as in Ollama; a completion where the body has raw or a suffix. Raises
    what `resolve_chat` raises."""
    body = parse(given, OllamaGenerateRequest)
    name = model.answer_name(plain_name(body.model, model))
    if body.images and (body.raw or body.suffix):
        raise InvalidRequest("images: not with raw or suffix, which are read without the template", param="images")
    if not body.prompt and not body.images:
        return Reply(loaded(name, "response"), {})
    if not body.raw and not body.suffix:
        turns = [{"role": "system", "content": with_images(body.system, (), "")}] if body.system else []
        content = with_images(body.prompt, body.images, "images")
        return _chat(body, [*turns, {"role": "user", "content": content}], (), name, model, config)
    with named_by_caller(NAMES):
        fields = {**sampling(body, model), "prompt": body.prompt, "model": name}
        if body.suffix:
            fields["suffix"] = body.suffix
        asked, ignored = validated(fields, CompletionRequest), body.ignored_params()
        call = completion_call(asked, model, config, writer=OllamaWriter, ignored=ignored)
    return in_own_words(call, NAMES)


def _chat(
    body: OllamaBody,
    turns: list[dict[str, Any]],
    tools: Sequence[Any],
    name: str,
    model: ServedModel,
    config: ServerConfig,
) -> Resolved:
    whole = isinstance(body, OllamaChatRequest)
    names = NAMES if whole else {**NAMES, "messages": "prompt"}
    with named_by_caller(names) as places:
        fields = {
            **sampling(body, model),
            "model": name,
            "messages": placed(turns, places),
            "tools": [tool.as_dict() for tool in tools],
            **thinking(body, model),
        }
        writer = OllamaChatWriter if whole else OllamaWriter
        call = chat_call(validated(fields, ChatRequest), model, config, writer=writer, ignored=body.ignored_params())
    return in_own_words(call, names, places)


def plain_name(asked: str | None, model: ServedModel) -> str | None:
    """The name without the tag that Ollama's clients add."""
    return None if asked is None else untagged(asked, (*model.names, *model.adapters))


def untagged(asked: str, names: Collection[str]) -> str:
    """The name without its tag :latest, unless `names` has the tagged one."""
    return asked if asked in names else asked.removesuffix(":latest")


def turns_of(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """A chat's turns. Ollama's calls need no ids: a tool's result is that of the first call without one."""
    turns: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for index, message in enumerate(messages):
        content = with_images(message.content, message.images, f"messages[{index}].images")
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
        turns.append({**turn, FIELD: f"messages[{index}]"})
    return turns


def with_images(text: str, images: Sequence[str], field: str) -> list[dict[str, Any]]:
    """A message's content; its images, in base64, which the caller has in `field`, stand before the text, as in
    Ollama."""
    shown = [image_part(f"data:;base64,{image}", f"{field}[{index}]") for index, image in enumerate(images)]
    return [*shown, {"type": "text", "text": text}]


def sampling(body: OllamaBody, model: ServedModel) -> dict[str, Any]:
    """The fields that a chat and a completion have in common. None: the model's default."""
    options = body.options
    most = options.num_predict
    fields: dict[str, Any] = {
        "max_tokens": -1 if most is None or most < 0 else most,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
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


def thinking(body: OllamaBody, model: ServedModel) -> dict[str, Any]:
    """The chat's fields about thinking; only the variables that the template has."""
    think, switch = body.think, model.formats.thinking
    if think is None:
        return {}
    fields: dict[str, Any] = {"include_reasoning": think is not False}
    effort = think if isinstance(think, str) else None
    fields["chat_template_kwargs"] = switch.switched(think is not False, effort)
    if effort is not None and switch.efforts:
        fields["reasoning_effort"] = think
    return fields


def resolve_embed(given: bytes, model: ServedModel, config: ServerConfig) -> VectorSpec:
    """Raises as above."""
    body = parse(given, OllamaEmbedRequest)
    fields = {"input": body.input, "dimensions": body.dimensions}
    if body.truncate:
        fields["truncate_prompt_tokens"] = -1
    return _vectors(body.model, fields, embed, model, config)


def resolve_embeddings(given: bytes, model: ServedModel, config: ServerConfig) -> VectorSpec:
    """Raises as above."""
    body = parse(given, OllamaEmbeddingsRequest)
    fields = {"input": body.prompt, "truncate_prompt_tokens": -1}
    return _vectors(body.model, fields, embedding, model, config)


def _vectors(
    asked: str | None, fields: dict[str, Any], answer: VectorAnswer, model: ServedModel, config: ServerConfig
) -> VectorSpec:
    body = validated({**fields, "model": plain_name(asked, model)}, EmbeddingRequest)
    return embedding_spec(body, answer, model, config)
