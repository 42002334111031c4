from __future__ import annotations

import re
from typing import Any

from quire.engine.common.errors import InvalidRequest
from quire.server.config import ServerConfig
from quire.server.encoding import encode_json
from quire.server.formats.reasoning_parser import make_engine_thinking_budget
from quire.server.generation.response_writers.messages import MessagesWriter
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.chat_translation import CHAT_EXTENSIONS
from quire.server.protocol.messages import (
    CountTokensRequest,
    ImageBlock,
    InputMessage,
    InputTool,
    MessagesRequest,
    NamedChoice,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from quire.server.protocol.request_bodies import ignored_params_header
from quire.server.resolve.chat import params_ignored_by_template, resolve_chat_request
from quire.server.resolve.checks import check_no_surrogates
from quire.server.resolve.other_apis.chat_conversion import (
    CallerFields,
    ChatTurn,
    count_chat_tokens,
    extend_or_add_turn,
    image_content_part,
    merge_user_turns,
    record_caller_field,
    rename_fields_in_raised_errors,
    tool_result_turn,
)
from quire.server.resolve.other_apis.fingerprints import fingerprint_message_prompt
from quire.server.resolve.parse import parse_body, validate_body
from quire.server.resolve.resolved_generation import AnswerForm, ResolvedGeneration
from quire.server.resolve.tokenize_requests import JsonReply
from quire.server.served_model import ServedModel

ANTHROPIC_FIELD_NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "function.parameters": "input_schema",
}
MESSAGES_FORM = AnswerForm(MessagesWriter, "msg_", ANTHROPIC_FIELD_NAMES)
BILLING_HEADER = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
"""Claude Code's first system line. It changes with every request, and so defeats the prefix cache."""


def resolve_message(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> ResolvedGeneration:
    body = parse_body(body_bytes, MessagesRequest)
    model.resolve_model_name(body.model)
    ignored = [*body.check_params_and_list_ignored(), *ignored_thinking_params(body, model)]
    with rename_fields_in_raised_errors(ANTHROPIC_FIELD_NAMES) as caller_fields:
        fields = {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stream": body.stream,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True} if body.stream else None,
        }
        chat = chat_request_from_messages(body, model, fields, caller_fields)
        resolved = resolve_chat_request(
            chat, model, config, MESSAGES_FORM, ignored=ignored, caller_fields=caller_fields
        )
    if body.diagnostics is None:
        return resolved
    check_no_surrogates(body.diagnostics.previous_message_id or "", "diagnostics.previous_message_id")
    (prompt,) = resolved.request.prompts
    fingerprint = fingerprint_message_prompt(body, chat, prompt, system_texts(body))
    return resolved.with_fingerprint(fingerprint, body.diagnostics.previous_message_id)


def count_message_tokens(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> JsonReply:
    body = parse_body(body_bytes, CountTokensRequest)
    model.resolve_model_name(body.model)
    with rename_fields_in_raised_errors(ANTHROPIC_FIELD_NAMES) as caller_fields:
        chat = chat_request_from_messages(body, model, {}, caller_fields)
        others = [name for name in body.model_extra or () if name not in CHAT_EXTENSIONS]
        ignored = [
            *others,
            *ignored_thinking_params(body, model),
            *params_ignored_by_template(chat, model.chat_formats),
        ]
        headers = ignored_params_header(ignored, config.strict)
        count, adapted = count_chat_tokens(chat, model, config, caller_fields)
    return JsonReply(encode_json({"input_tokens": count}), headers | adapted)


def ignored_thinking_params(body: CountTokensRequest, model: ServedModel) -> list[str]:
    ignored = []
    if body.thinking is not None and body.thinking.type == "enabled":
        if model.chat_formats.reasoning_format is None and not model.chat_formats.thinking_switch.is_switchable:
            ignored.append("thinking")
        elif body.thinking.budget_tokens is not None and not can_limit_thinking(model):
            ignored.append("thinking.budget_tokens")
    if body.thinking_effort is not None and not model.chat_formats.thinking_switch.effort_words:
        ignored.append("output_config.effort")
    return ignored


def chat_request_from_messages(
    body: CountTokensRequest, model: ServedModel, fields: dict[str, Any], caller_fields: CallerFields
) -> ChatRequest:
    turns = merge_user_turns(turns_from_messages(body), caller_fields)
    chat: dict[str, Any] = {
        **fields,
        "model": body.model,
        "messages": turns,
        "tools": [{"type": "function", "function": function_from_tool(tool)} for tool in body.tools],
        "parallel_tool_calls": body.allows_parallel_tool_calls,
        "session_ttl": body.max_cache_seconds,
        **body.pick_extensions(),
        **chat_thinking_fields(body, model),
    }
    if body.effective_output_format is not None:
        schema = {"name": "answer", "schema": body.effective_output_format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    choice = body.tool_choice
    if isinstance(choice, NamedChoice):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        chat["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
    if turns[-1]["role"] == "assistant" and not turns[-1].get("tool_calls"):  # the answer continues this turn
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return validate_body(chat, ChatRequest)


def function_from_tool(tool: InputTool) -> dict[str, Any]:
    details = {"description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"name": tool.name, **details}


def chat_thinking_fields(body: CountTokensRequest, model: ServedModel) -> dict[str, Any]:
    thinking = body.thinking
    kind = "disabled" if thinking is None else thinking.type
    variables: dict[str, Any] = {}
    if kind != "adaptive":
        variables |= model.chat_formats.thinking_switch.thinking_variables(kind == "enabled", body.thinking_effort)
    template_kwargs = body.pick_extensions().get("chat_template_kwargs", {})
    fields: dict[str, Any] = {
        "chat_template_kwargs": {**variables, **template_kwargs}
        if isinstance(template_kwargs, dict)
        else template_kwargs
    }
    if thinking is not None:
        fields["include_reasoning"] = kind != "disabled"
    if thinking is not None and can_limit_thinking(model):
        fields["thinking_token_budget"] = thinking.budget_tokens
    if body.thinking_effort is not None and model.chat_formats.thinking_switch.effort_words:
        fields["reasoning_effort"] = body.thinking_effort
    return fields


def can_limit_thinking(model: ServedModel) -> bool:
    """Without tokens that begin and end thinking, a budget is ignored, because Anthropic's budget is only a target."""
    try:
        return make_engine_thinking_budget(1, model.chat_formats.reasoning_format, None, model.tokenizer) is not None
    except InvalidRequest:
        return False


def turns_from_messages(body: CountTokensRequest) -> list[ChatTurn]:
    system = system_texts(body)
    turns: list[ChatTurn] = []
    if system:
        turns.append({"role": "system", "content": chat_parts_from_texts(system)})
        record_caller_field(turns, "system")
    names_by_call_id: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        if message.role == "assistant":
            turns.append(assistant_turn(message, names_by_call_id))
        else:
            append_user_turns(turns, message, names_by_call_id, f"messages[{index}]")
        record_caller_field(turns, f"messages[{index}]")
    if not turns:
        raise InvalidRequest("messages must have content", param="messages")
    return turns


def system_texts(body: CountTokensRequest) -> list[str]:
    texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system]
    stripped_texts = (BILLING_HEADER.sub("", text, 1) if BILLING_HEADER.match(text) else text for text in texts)
    return [text for text in stripped_texts if text]


def append_user_turns(
    turns: list[ChatTurn], message: InputMessage, names_by_call_id: dict[str, str], message_field: str
) -> None:
    for place, block in enumerate(message_blocks(message)):
        field = f"{message_field}.content[{place}]"
        if isinstance(block, ToolResultBlock):
            turns.append(tool_result_turn(block.tool_use_id, tool_result_content(block, field), names_by_call_id))
        elif isinstance(block, TextBlock | ImageBlock):
            extend_or_add_turn(turns, message.role, [content_part_from_block(block, field)])
        else:
            raise InvalidRequest(f"messages: a block of type {block.type} is the assistant's", param="messages")


def tool_result_content(block: ToolResultBlock, field: str) -> str | list[ChatTurn]:
    shown = block.content
    if isinstance(shown, str) or not any(isinstance(each, ImageBlock) for each in shown):
        text = (
            shown if isinstance(shown, str) else "\n".join(each.text for each in shown if isinstance(each, TextBlock))
        )
        return f"Error: {text}" if block.is_error else text
    content_parts = [content_part_from_block(each, f"{field}.content[{place}]") for place, each in enumerate(shown)]
    return [*chat_parts_from_texts(["Error:"] if block.is_error else []), *content_parts]


def assistant_turn(message: InputMessage, names_by_call_id: dict[str, str]) -> ChatTurn:
    blocks = message_blocks(message)
    turn: ChatTurn = {
        "role": "assistant",
        "content": chat_parts_from_texts([each.text for each in blocks if isinstance(each, TextBlock)]),
    }
    thoughts = [each.thinking for each in blocks if isinstance(each, ThinkingBlock)]
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    calls = [each for each in blocks if isinstance(each, ToolUseBlock)]
    if calls:
        names_by_call_id |= {call.id: call.name for call in calls}
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    if user_blocks := [each for each in blocks if isinstance(each, ToolResultBlock | ImageBlock)]:
        raise InvalidRequest(f"messages: a block of type {user_blocks[0].type} is the user's", param="messages")
    return turn


def message_blocks(message: InputMessage) -> list[Any]:
    content = message.content
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def content_part_from_block(block: TextBlock | ImageBlock, field: str) -> ChatTurn:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    return image_content_part(block.url, f"{field}.source")


def chat_parts_from_texts(texts: list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]
