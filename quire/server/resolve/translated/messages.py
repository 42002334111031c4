"""From Anthropic's messages to a chat, and to the spec of its generation."""

from __future__ import annotations

import re
from typing import Any

from quire.engine.errors import InvalidRequest
from quire.server.config import ServerConfig
from quire.server.encoding import encode_json
from quire.server.formats.reasoning import thinking_budget
from quire.server.generation.answers.messages import MessagesWriter
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.common import ignored_header
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
from quire.server.protocol.translated import EXTENSIONS
from quire.server.resolve.chat import chat_call, ignored_by_template
from quire.server.resolve.common import Resolved
from quire.server.resolve.parse import parse, validated
from quire.server.resolve.tokenize import Reply
from quire.server.resolve.translated.as_chat import (
    Places,
    Turn,
    add_parts,
    image_part,
    in_own_words,
    named_by_caller,
    note_field,
    placed,
    prompt_tokens,
    tool_turn,
)
from quire.server.served_model import ServedModel

NAMES = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "function.parameters": "input_schema",
}
"""Names of a chat's fields, and what Anthropic calls them."""
BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
"""A line that Claude Code begins its system prompt with. It changes with every request, and no prefix would be found in
the cache again."""


def resolve_message(given: bytes, model: ServedModel, config: ServerConfig) -> Resolved:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    body = parse(given, MessagesRequest)
    model.answer_name(body.model)
    ignored = [*body.ignored_params(), *without_effect(body, model)]
    with named_by_caller(NAMES) as places:
        fields = {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stream": body.stream,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True} if body.stream else None,
        }
        chat = as_chat(body, model, fields, places)
        call = chat_call(chat, model, config, writer=MessagesWriter, id_prefix="msg_", ignored=ignored)
    return in_own_words(call, NAMES, places)


def count_tokens(given: bytes, model: ServedModel, config: ServerConfig) -> Reply:
    """The number of tokens of the prompt that these messages make. Raises as above."""
    body = parse(given, CountTokensRequest)
    model.answer_name(body.model)
    with named_by_caller(NAMES) as places:
        chat = as_chat(body, model, {}, places)
        others = [name for name in body.model_extra or () if name not in EXTENSIONS]
        ignored = [*others, *without_effect(body, model), *ignored_by_template(chat, model.formats)]
        headers = ignored_header(ignored, config.strict)
        count, adapted = prompt_tokens(chat, model, config, places)
    return Reply(encode_json({"input_tokens": count}), headers | adapted)


def without_effect(body: CountTokensRequest, model: ServedModel) -> list[str]:
    """Names of parameters that change nothing with this model."""
    ignored = []
    if body.thinking is not None and body.thinking.type == "enabled":
        if model.formats.reasoning is None and not model.formats.thinking.works:
            ignored.append("thinking")
        elif body.thinking.budget_tokens is not None and not can_limit_thinking(model):
            ignored.append("thinking.budget_tokens")
    if body.effort is not None and not model.formats.thinking.efforts:
        ignored.append("output_config.effort")
    return ignored


def as_chat(body: CountTokensRequest, model: ServedModel, fields: dict[str, Any], places: Places) -> ChatRequest:
    """The chat that a body asks for, with more `fields`. Raises InvalidRequest."""
    turns = placed(turns_of(body), places)
    chat: dict[str, Any] = {
        **fields,
        "model": body.model,
        "messages": turns,
        "tools": [{"type": "function", "function": function_of(tool)} for tool in body.tools],
        "parallel_tool_calls": body.parallel,
        "session_ttl": body.keep_seconds,
        **body.extensions(),
        **thinking_fields(body, model),
    }
    if body.format is not None:
        schema = {"name": "answer", "schema": body.format.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    choice = body.tool_choice
    if isinstance(choice, NamedChoice):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None:
        chat["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
    if turns[-1]["role"] == "assistant" and not turns[-1].get("tool_calls"):  # the answer goes on with it
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return validated(chat, ChatRequest)


def function_of(tool: InputTool) -> dict[str, Any]:
    told = {"description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"name": tool.name, **told}


def thinking_fields(body: CountTokensRequest, model: ServedModel) -> dict[str, Any]:
    """The chat's fields about thinking; of the template's variables only those that it has."""
    thinking = body.thinking
    kind = "disabled" if thinking is None else thinking.type
    variables: dict[str, Any] = {}
    if kind != "adaptive":
        variables |= model.formats.thinking.switched(kind == "enabled", body.effort)
    given = body.extensions().get("chat_template_kwargs", {})
    fields: dict[str, Any] = {"chat_template_kwargs": {**variables, **given} if isinstance(given, dict) else given}
    if thinking is not None:
        fields["include_reasoning"] = kind != "disabled"
    if thinking is not None and can_limit_thinking(model):
        fields["thinking_token_budget"] = thinking.budget_tokens
    if body.effort is not None and model.formats.thinking.efforts:
        fields["reasoning_effort"] = body.effort
    return fields


def can_limit_thinking(model: ServedModel) -> bool:
    """Anthropic's budget is a target, so a model without tokens for it is not a reason to refuse a request."""
    try:
        return thinking_budget(1, model.formats.reasoning, None, model.tokenizer) is not None
    except InvalidRequest:
        return False


def turns_of(body: CountTokensRequest) -> list[Turn]:
    """The conversation as a chat's messages, at least one. Raises InvalidRequest."""
    system = [
        BILLING.sub("", text, 1) if BILLING.match(text) else text
        for text in ([body.system] if isinstance(body.system, str) else [block.text for block in body.system])
    ]
    turns: list[Turn] = []
    if any(system):
        turns.append({"role": "system", "content": parts([text for text in system if text])})
        note_field(turns, "system")
    called: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        if message.role == "assistant":
            turns.append(assistant_turn(message, called))
        else:
            add_turns(turns, message, called, f"messages[{index}]")
        note_field(turns, f"messages[{index}]")
    if not turns:
        raise InvalidRequest("messages must have content", param="messages")
    return turns


def add_turns(turns: list[Turn], message: InputMessage, called: dict[str, str], where: str) -> None:
    """Add a user's message: each result of a tool is a turn of its own, and texts behind one another are one turn.
    `where`: its field."""
    for place, block in enumerate(blocks_of(message)):
        field = f"{where}.content[{place}]"
        if isinstance(block, ToolResultBlock):
            turns.append(tool_turn(block.tool_use_id, result_of(block, field), called))
        elif isinstance(block, TextBlock | ImageBlock):
            add_parts(turns, message.role, [part_of(block, field)])
        else:
            raise InvalidRequest(f"messages: a block of type {block.type} is the assistant's", param="messages")


def result_of(block: ToolResultBlock, field: str) -> str | list[Turn]:
    """What a tool returned: text, or parts where some are images."""
    shown = block.content
    if isinstance(shown, str) or not any(isinstance(each, ImageBlock) for each in shown):
        text = (
            shown if isinstance(shown, str) else "\n".join(each.text for each in shown if isinstance(each, TextBlock))
        )
        return f"Error: {text}" if block.is_error else text
    found = [part_of(each, f"{field}.content[{place}]") for place, each in enumerate(shown)]
    return [*parts(["Error:"] if block.is_error else []), *found]


def assistant_turn(message: InputMessage, called: dict[str, str]) -> Turn:
    """An assistant's turn. Notes the names of the functions that are `called`, by the call's id."""
    blocks = blocks_of(message)
    turn: Turn = {"role": "assistant", "content": parts([each.text for each in blocks if isinstance(each, TextBlock)])}
    thoughts = [each.thinking for each in blocks if isinstance(each, ThinkingBlock)]
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    calls = [each for each in blocks if isinstance(each, ToolUseBlock)]
    if calls:
        called |= {call.id: call.name for call in calls}
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    if theirs := [each for each in blocks if isinstance(each, ToolResultBlock | ImageBlock)]:
        raise InvalidRequest(f"messages: a block of type {theirs[0].type} is the user's", param="messages")
    return turn


def blocks_of(message: InputMessage) -> list[Any]:
    content = message.content
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def part_of(block: TextBlock | ImageBlock, field: str) -> Turn:
    """A chat's content part; `field`: the block's."""
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    return image_part(block.url, f"{field}.source")


def parts(texts: list[str]) -> list[dict[str, str]]:
    """A chat's content."""
    return [{"type": "text", "text": text} for text in texts]
