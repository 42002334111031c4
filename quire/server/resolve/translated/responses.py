"""From a request of the Responses API to a chat, and to the spec of its generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from quire.engine.errors import InvalidRequest
from quire.engine.types import SamplingParams
from quire.server.config import ServerConfig
from quire.server.encoding import encode_json
from quire.server.generation.answers.responses import ResponsesWriter
from quire.server.generation.spec import ResponseFields
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import ignored_header
from quire.server.protocol.items import Item, ItemReference, Message, full_name
from quire.server.protocol.responses import (
    ENCRYPTED,
    LOGPROBS,
    MAX_REPEATED,
    AllowedTools,
    ChosenTool,
    CustomTool,
    FunctionTool,
    ResponsesRequest,
)
from quire.server.resolve.chat import chat_call, ignored_by_template
from quire.server.resolve.checks import NeedsWorker, check_text, check_texts
from quire.server.resolve.common import Resolved
from quire.server.resolve.parse import parse, validated
from quire.server.resolve.tokenize import Reply
from quire.server.resolve.translated.as_chat import (
    Places,
    in_own_words,
    named_by_caller,
    placed,
    prompt_tokens,
)
from quire.server.resolve.translated.history import before, in_conversation, kept_items, referred
from quire.server.resolve.translated.items import turns_of
from quire.server.served_model import ServedModel

ITEM: TypeAdapter[Item] = TypeAdapter(Item)
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
NO_STORE = "this server stores no responses; the operator may pass --data-dir"
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "function.parameters": "parameters",
    "custom.format": "format",
}
"""Names of a chat's fields, and what they are called here."""

OF_ANSWERS = {
    *("max_output_tokens", "temperature", "top_p", "top_logprobs", "include", "metadata", "stream", "stream_options"),
    *("store", "background", "safety_identifier", "prompt_cache_key"),
}
"""What says nothing of the prompt."""


def resolve_response(given: bytes, model: ServedModel, config: ServerConfig, *, owner: str) -> Resolved:
    """`owner`: whose stored responses may be named. Raises ModelNotFound, and InvalidRequest naming the parameter."""
    body = parse(given, ResponsesRequest)
    model.answer_name(body.model)
    check_stored(body, config)
    earlier, items = all_items(body, model, config, owner)
    ignored = without_effect(body, model)
    if body.store and config.data_dir is None:
        ignored.append("store")
    with named_by_caller(NAMES) as places:
        chat = as_chat(body, earlier, items, model, places)
        call = chat_call(chat, model, config, writer=ResponsesWriter, id_prefix="resp_", ignored=ignored)
    if chat.logprobs and call.spec.message is not None:  # which tokens are the text's, the parsers do not tell
        message = "log probabilities are not available here with tools or thinking: /v1/chat/completions has them"
        raise InvalidRequest(f"top_logprobs: {message}", param="top_logprobs")
    stored = config.data_dir is not None and body.store is not False
    conversation = body.conversation_id
    stored_input = kept_items(items, "input", conversation=conversation is not None) if stored or conversation else ()
    fields = ResponseFields(
        repeated=as_json({**repeated(body, call.spec.params), "store": stored}),
        namespaces={full_name(space, tool.name): (space, tool.name) for space, tool in body.own_tools if space},
        sealed=ENCRYPTED in body.include,
        store=stored,
        background=body.background,
        input=stored_input,
        previous=body.previous_response_id,
        conversation=conversation,
    )
    return in_own_words(replace(call, spec=replace(call.spec, response=fields)), NAMES, places)


def count_input_tokens(given: bytes, model: ServedModel, config: ServerConfig, *, owner: str) -> Reply:
    """The number of tokens of the prompt that a response to this body has. Raises as above."""
    body = parse(given, ResponsesRequest)
    model.answer_name(body.model)
    check_stored(body, config)
    earlier, items = all_items(body, model, config, owner)
    ignored = [*without_effect(body, model), *sorted(OF_ANSWERS & body.model_fields_set)]
    with named_by_caller(NAMES) as places:
        chat = as_chat(body, earlier, items, model, places)
        ignored += ignored_by_template(chat, model.formats)
        headers = ignored_header(ignored, config.strict)
        count, adapted = prompt_tokens(chat, model, config, places)
    return Reply(encode_json({"object": "response.input_tokens", "input_tokens": count}), headers | adapted)


def as_json(told: Mapping[str, Any]) -> bytes:
    """The fields that the answer repeats. Raises InvalidRequest for those that are not text, or too large together."""
    sizes = {}
    for name, value in told.items():
        check_texts(value, name)
        sizes[name] = len(encode_json(value))
    if sum(sizes.values()) > MAX_REPEATED:
        name = max(sizes, key=lambda one: sizes[one])
        message = f"{name} is too large: an answer repeats at most {MAX_REPEATED} bytes of its request"
        raise InvalidRequest(message, param=name)
    return encode_json(told)


def check_stored(body: ResponsesRequest, config: ServerConfig) -> None:
    """Refuse a request that needs the store if there is none or if the request itself forbids its use."""
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name) and config.data_dir is None:
            raise InvalidRequest(f"{name}: {NO_STORE}", param=name)
    check_text(body.previous_response_id or "", "previous_response_id")
    check_text(body.conversation_id or "", "conversation")
    if body.previous_response_id is not None and body.conversation is not None:
        raise InvalidRequest("conversation and previous_response_id exclude each other", param="conversation")
    if body.background and body.store is False:
        raise InvalidRequest("background needs store to be true", param="background")


def all_items(
    body: ResponsesRequest, model: ServedModel, config: ServerConfig, owner: str
) -> tuple[list[Item], list[Item]]:
    """The items before this request's, and its own. Raises InvalidRequest, and NeedsWorker: there may be many."""
    folder, previous, conversation = config.data_dir, body.previous_response_id, body.conversation_id
    if isinstance(body.input, str):
        given: Sequence[Item | ItemReference] = [Message(role="user", content=body.input)] if body.input else []
    else:
        given = body.input
    ids = [item.id for item in given if isinstance(item, ItemReference)]
    if folder is None or not (previous or conversation or ids):
        if ids:
            raise InvalidRequest(f"input: {NO_STORE}", param="input")
        return [], [item for item in given if not isinstance(item, ItemReference)]
    if not model.expendable:
        raise NeedsWorker
    found = in_conversation(folder, owner, conversation) if conversation else []
    if previous:
        found = before(folder, owner, previous)
    known = referred(folder, owner, ids, found) if ids else {}
    own = [ITEM.validate_python(known[one.id]) if isinstance(one, ItemReference) else one for one in given]
    return ITEMS.validate_python(found), own


def without_effect(body: ResponsesRequest, model: ServedModel) -> list[str]:
    ignored = body.ignored_params()
    if body.reasoning.effort is not None and not effort_works(model):
        ignored.append("reasoning.effort")
    return ignored


def effort_works(model: ServedModel) -> bool:
    return model.formats.thinking.works or bool(model.formats.thinking.efforts)


def as_chat(
    body: ResponsesRequest, earlier: Sequence[Item], items: Sequence[Item], model: ServedModel, places: Places
) -> ChatRequest:
    """The chat that a body asks for. Raises InvalidRequest."""
    developer = "developer" in model.formats.template
    turns = turns_of([*earlier, *items], body.instructions or "", developer=developer, earlier=len(earlier))
    turns = placed(turns, places)
    if not turns:
        raise InvalidRequest(f"input must not be empty{body.misspelt()}", param="input")
    tools, choice = tools_of(body)
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": turns,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": bool(body.top_logprobs) or LOGPROBS in body.include,
        "top_logprobs": body.top_logprobs,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if effort_works(model) else None,
        "stream": body.stream,
        "prompt_cache_key": body.prompt_cache_key,
        **body.extensions(),
    }
    form = body.text.format
    if form.type == "json_object":
        chat["response_format"] = {"type": "json_object"}
    elif form.type == "json_schema":
        schema = {"name": form.name, "schema": form.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return validated(chat, ChatRequest)


def tools_of(body: ResponsesRequest) -> tuple[list[dict[str, Any]], Any]:
    """The tools and the tool_choice of a chat. Raises InvalidRequest."""
    tools: dict[str, FunctionTool | CustomTool] = {}
    for namespace, tool in body.own_tools:
        name = full_name(namespace, tool.name)
        if name in tools:
            raise InvalidRequest(f"tools: there are two tools named {name}", param="tools")
        tools[name] = tool
    choice: Any = body.tool_choice
    if isinstance(choice, AllowedTools):
        allowed = {tool.name for tool in choice.tools}
        if missing := allowed - tools.keys():
            raise InvalidRequest(f"tool_choice: there is no tool named {min(missing)}", param="tool_choice")
        tools = {name: tool for name, tool in tools.items() if name in allowed}
        choice = choice.mode
    elif isinstance(choice, ChosenTool):
        choice = {"type": "function", "function": {"name": choice.name}}
    return [tool_of(name, tool) for name, tool in tools.items()], choice


def tool_of(name: str, tool: FunctionTool | CustomTool) -> dict[str, Any]:
    """A chat's tool of this name."""
    fields = {**tool.model_dump(exclude={"type", "format"}, exclude_none=True), "name": name}
    if isinstance(tool, CustomTool) and tool.grammar is not None:
        grammar = {"syntax": tool.grammar.syntax, "definition": tool.grammar.definition}
        fields["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": tool.type, tool.type: fields}


def repeated(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """The request's fields that the answer repeats, with defaults for those that were not given. The answer's schema
    requires all of them."""
    given = {"parameters": None, "strict": None}
    tools = [
        (given if isinstance(tool, FunctionTool) else {}) | tool.model_dump(exclude_none=True) for tool in body.tools
    ]
    choice = body.tool_choice
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "background": body.background,
        "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
        "service_tier": "default",
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "temperature": params.temperature,
        "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
        | ({} if body.text.verbosity is None else {"verbosity": body.text.verbosity}),
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": tools,
        "top_logprobs": body.top_logprobs,
        "top_p": params.top_p,
        "truncation": "disabled",
    }
