from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import SamplingParams
from quire.server.config import ServerConfig
from quire.server.encoding import encode_json
from quire.server.generation.resolved_request import ResponsesApiFields
from quire.server.generation.response_writers.responses import ResponsesWriter
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.request_bodies import ignored_params_header
from quire.server.protocol.response_items import InputItem, ItemReference, Message, namespaced_tool_name
from quire.server.protocol.responses import (
    INCLUDE_ENCRYPTED_REASONING,
    INCLUDE_LOGPROBS,
    MAX_ECHOED_BYTES,
    AllowedTools,
    ChosenTool,
    CustomTool,
    FunctionTool,
    ResponsesRequest,
)
from quire.server.resolve.chat import params_ignored_by_template, resolve_chat_request
from quire.server.resolve.checks import NeedsWorker, check_json_no_surrogates, check_no_surrogates
from quire.server.resolve.other_apis.chat_conversion import (
    CallerFields,
    count_chat_tokens,
    merge_user_turns,
    rename_fields_in_raised_errors,
)
from quire.server.resolve.other_apis.fingerprints import fingerprint_response_prompt
from quire.server.resolve.other_apis.history import (
    NO_STORE_MESSAGE,
    StoredItem,
    WebSocketHistory,
    conversation_items,
    load_referenced_items,
    previous_response_not_found,
    response_history,
    to_cached_items,
    to_stored_items,
)
from quire.server.resolve.other_apis.input_items import turns_from_items
from quire.server.resolve.parse import parse_body, validate_body
from quire.server.resolve.resolved_generation import AnswerForm, ResolvedGeneration
from quire.server.resolve.tokenize_requests import JsonReply
from quire.server.served_model import ServedModel

ITEM_ADAPTER: TypeAdapter[InputItem] = TypeAdapter(InputItem)
ITEMS_ADAPTER: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
RESPONSES_FIELD_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "function.parameters": "parameters",
    "custom.format": "format",
}
RESPONSES_FORM = AnswerForm(ResponsesWriter, "resp_", RESPONSES_FIELD_NAMES)

FIELDS_NOT_OF_PROMPT = {
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_logprobs",
    "include",
    "metadata",
    "stream",
    "stream_options",
    "store",
    "background",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "generate",
}


def resolve_response(
    body_bytes: bytes,
    model: ServedModel,
    config: ServerConfig,
    *,
    owner: str,
    history: WebSocketHistory | None = None,
) -> ResolvedGeneration:
    """Only stored responses of `owner` may be named. `history` is None for a POST."""
    body = parse_body(body_bytes, ResponsesRequest)
    model.resolve_model_name(body.model)
    check_store_fields(body, config, history)
    earlier, items = load_items(body, model, config, owner, history)
    ignored = params_without_effect(body, model)
    if body.store and config.data_dir is None:
        ignored.append("store")
    with rename_fields_in_raised_errors(RESPONSES_FIELD_NAMES) as caller_fields:
        chat = chat_request_from_items(body, earlier, items, model, caller_fields)
        resolved = resolve_chat_request(
            chat, model, config, RESPONSES_FORM, ignored=ignored, caller_fields=caller_fields
        )
    if chat.logprobs and resolved.request.message_format is not None:  # parsers cannot say which tokens are text
        message = "log probabilities are not available here with tools or thinking: /v1/chat/completions has them"
        raise InvalidRequest(f"top_logprobs: {message}", param="top_logprobs")
    stored = config.data_dir is not None and body.store is not False
    conversation = body.conversation_id
    stored_input: Sequence[StoredItem] | None = ()
    if stored or conversation:
        stored_input = to_stored_items(items, "input", in_conversation=conversation is not None)
    elif history is not None:
        stored_input = to_cached_items(items)
    fields = ResponsesApiFields(
        echoed_fields=encode_echoed_fields({**echoed_fields(body, resolved.request.params), "store": stored}),
        namespaces={
            namespaced_tool_name(space, tool.name): (space, tool.name)
            for space, tool in body.tools_with_namespace
            if space
        },
        encrypts_reasoning=INCLUDE_ENCRYPTED_REASONING in body.include,
        store=stored,
        background=body.background,
        input_items=stored_input or (),
        cache_for_websocket=history is not None and stored_input is not None,
        previous_id=body.previous_response_id,
        conversation_id=conversation,
        continues_unstored_response=history is not None and history.continues_unstored_response,
    )
    (prompt,) = resolved.request.prompts
    fingerprint = fingerprint_response_prompt(body, chat, prompt, [*earlier, *items])
    resolved = resolved.with_responses_fields(fields, prompt_only=not body.generate)
    return resolved.with_fingerprint(fingerprint, body.prompt_cache_options.comparison_response_id)


def count_input_tokens(body_bytes: bytes, model: ServedModel, config: ServerConfig, *, owner: str) -> JsonReply:
    body = parse_body(body_bytes, ResponsesRequest)
    model.resolve_model_name(body.model)
    check_store_fields(body, config)
    earlier, items = load_items(body, model, config, owner)
    ignored = [*params_without_effect(body, model), *sorted(FIELDS_NOT_OF_PROMPT & body.model_fields_set)]
    with rename_fields_in_raised_errors(RESPONSES_FIELD_NAMES) as caller_fields:
        chat = chat_request_from_items(body, earlier, items, model, caller_fields)
        ignored += params_ignored_by_template(chat, model.chat_formats)
        headers = ignored_params_header(ignored, config.strict)
        count, adapted = count_chat_tokens(chat, model, config, caller_fields)
    return JsonReply(encode_json({"object": "response.input_tokens", "input_tokens": count}), headers | adapted)


def encode_echoed_fields(fields: Mapping[str, Any]) -> bytes:
    """Raises InvalidRequest for invalid text, or if all fields are too large."""
    sizes = {}
    for name, value in fields.items():
        check_json_no_surrogates(value, name)
        sizes[name] = len(encode_json(value))
    if sum(sizes.values()) > MAX_ECHOED_BYTES:
        name = max(sizes, key=lambda one: sizes[one])
        message = f"{name} is too large: an answer repeats at most {MAX_ECHOED_BYTES} bytes of its request"
        raise InvalidRequest(message, param=name)
    return encode_json(fields)


def check_store_fields(body: ResponsesRequest, config: ServerConfig, history: WebSocketHistory | None = None) -> None:
    """Raises InvalidRequest if the store is needed but missing or forbidden."""
    cached_response = None if history is None else history.previous
    if config.data_dir is None:
        if body.previous_response_id and history is not None and cached_response is None:
            raise previous_response_not_found(body.previous_response_id)
        for name in ("previous_response_id", "conversation", "background"):
            if getattr(body, name) and not (cached_response is not None and name == "previous_response_id"):
                raise InvalidRequest(f"{name}: {NO_STORE_MESSAGE}", param=name)
    elif cached_response is not None and not cached_response.is_stored and body.store is not False:
        message = f"store: the previous response, `{cached_response.id}`, is not stored: pass store false"
        raise InvalidRequest(message, param="store")
    check_no_surrogates(body.previous_response_id or "", "previous_response_id")
    check_no_surrogates(body.conversation_id or "", "conversation")
    comparison_id = body.prompt_cache_options.comparison_response_id
    check_no_surrogates(comparison_id or "", "prompt_cache_options.comparison_response_id")
    if body.previous_response_id is not None and body.conversation is not None:
        raise InvalidRequest("conversation and previous_response_id exclude each other", param="conversation")
    if body.background and body.store is False:
        raise InvalidRequest("background needs store to be true", param="background")


def load_items(
    body: ResponsesRequest,
    model: ServedModel,
    config: ServerConfig,
    owner: str,
    history: WebSocketHistory | None = None,
) -> tuple[list[InputItem], list[InputItem]]:
    """Returns earlier items and the request's own. Raises NeedsWorker before it reads the store, because there may be
    many items.
    """
    folder = config.data_dir
    previous = body.previous_response_id
    cached_response = None if history is None else history.previous
    conversation = body.conversation_id
    if isinstance(body.input, str):
        input_items: Sequence[InputItem | ItemReference] = (
            [Message(role="user", content=body.input)] if body.input else []
        )
    else:
        input_items = body.input
    ids = [item.id for item in input_items if isinstance(item, ItemReference)]
    if cached_response is None and (folder is None or not (previous or conversation or ids)):
        if ids:
            raise InvalidRequest(f"input: {NO_STORE_MESSAGE}", param="input")
        return [], [item for item in input_items if not isinstance(item, ItemReference)]
    reads_store = folder is not None and (cached_response is None or bool(ids))
    if reads_store and not model.expendable:
        raise NeedsWorker
    earlier_items = (
        _stored_earlier_items(folder, owner, body) if cached_response is None else cached_response.parse_items()
    )
    known = load_referenced_items(folder, owner, ids, earlier_items) if ids else {}
    own_items = [
        ITEM_ADAPTER.validate_python(known[one.id]) if isinstance(one, ItemReference) else one for one in input_items
    ]
    return ITEMS_ADAPTER.validate_python(earlier_items), own_items


def _stored_earlier_items(folder: Path | None, owner: str, body: ResponsesRequest) -> list[Any]:
    assert folder is not None, "refused otherwise"
    if body.previous_response_id:
        return response_history(folder, owner, body.previous_response_id)
    return conversation_items(folder, owner, body.conversation_id) if body.conversation_id else []


def params_without_effect(body: ResponsesRequest, model: ServedModel) -> list[str]:
    ignored = body.check_params_and_list_ignored()
    if body.reasoning.effort is not None and not can_set_effort(model):
        ignored.append("reasoning.effort")
    return ignored


def can_set_effort(model: ServedModel) -> bool:
    return model.chat_formats.thinking_switch.is_switchable or bool(model.chat_formats.thinking_switch.effort_words)


def chat_request_from_items(
    body: ResponsesRequest,
    earlier: Sequence[InputItem],
    items: Sequence[InputItem],
    model: ServedModel,
    caller_fields: CallerFields,
) -> ChatRequest:
    developer = "developer" in model.chat_formats.template_text
    turns = turns_from_items(
        [*earlier, *items], body.instructions or "", has_developer_role=developer, num_earlier=len(earlier)
    )
    turns = merge_user_turns(turns, caller_fields)
    if not turns:
        raise InvalidRequest(f"input must not be empty{body.misspelling_hint()}", param="input")
    tools, choice = chat_tools_and_choice(body)
    chat: dict[str, Any] = {
        "model": body.model,
        "messages": turns,
        "max_tokens": body.max_output_tokens if body.generate else 1,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": bool(body.top_logprobs) or INCLUDE_LOGPROBS in body.include,
        "top_logprobs": body.top_logprobs,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if can_set_effort(model) else None,
        "stream": body.stream,
        "prompt_cache_key": body.prompt_cache_key,
        **body.pick_extensions(),
    }
    form = body.text.format
    if form.type == "json_object":
        chat["response_format"] = {"type": "json_object"}
    elif form.type == "json_schema":
        schema = {"name": form.name, "schema": form.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return validate_body(chat, ChatRequest)


def chat_tools_and_choice(body: ResponsesRequest) -> tuple[list[dict[str, Any]], Any]:
    tools: dict[str, FunctionTool | CustomTool] = {}
    for namespace, tool in body.tools_with_namespace:
        name = namespaced_tool_name(namespace, tool.name)
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
    return [chat_tool(name, tool) for name, tool in tools.items()], choice


def chat_tool(name: str, tool: FunctionTool | CustomTool) -> dict[str, Any]:
    fields = {**tool.model_dump(exclude={"type", "format"}, exclude_none=True), "name": name}
    if isinstance(tool, CustomTool) and tool.grammar_format is not None:
        grammar = {"syntax": tool.grammar_format.syntax, "definition": tool.grammar_format.definition}
        fields["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": tool.type, tool.type: fields}


def echoed_fields(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """Fills in defaults, because the answer's schema requires all fields."""
    function_defaults = {"parameters": None, "strict": None}
    tools = [
        (function_defaults if isinstance(tool, FunctionTool) else {}) | tool.model_dump(exclude_none=True)
        for tool in body.tools
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
