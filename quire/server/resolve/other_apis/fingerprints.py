"""Fingerprints of what prompts are rendered from, for cache diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.cache_diagnostics import SETTINGS, PromptFingerprint, make_fingerprint
from quire.server.generation.resolved_request import Prompt
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.messages import InputMessage, MessagesRequest
from quire.server.protocol.response_items import InputItem
from quire.server.protocol.responses import ResponsesRequest

PROMPT_SETTINGS = {
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "add_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
}
"""The vendors' diagnostics have no reason that names these fields."""
CACHE_CONTROL = {"cache_control"}
"""Not part of the prompt: clients move it from turn to turn."""
MESSAGE_CACHE_CONTROL: Any = {"content": {"__all__": {"cache_control": True, "content": {"__all__": CACHE_CONTROL}}}}


def fingerprint_message_prompt(
    body: MessagesRequest, chat: ChatRequest, prompt: Prompt, system: Sequence[str]
) -> PromptFingerprint:
    parts = {
        "tools": [tool.model_dump(exclude=CACHE_CONTROL) for tool in body.tools],
        "system": system,
        SETTINGS: [*_prompt_settings(chat), chat.reasoning_effort],
    }
    return make_fingerprint(
        parts, [_message_without_cache_control(each) for each in body.messages], prompt.ids, prompt.spans
    )


def fingerprint_response_prompt(
    body: ResponsesRequest, chat: ChatRequest, prompt: Prompt, items: Sequence[InputItem]
) -> PromptFingerprint:
    parts = {
        "tools": [tool.model_dump() for tool in body.tools],
        "reasoning_effort": chat.reasoning_effort,
        SETTINGS: _prompt_settings(chat),
    }
    messages = [body.instructions, *(each.model_dump() for each in items)]
    return make_fingerprint(parts, messages, prompt.ids, prompt.spans)


def _prompt_settings(chat: ChatRequest) -> list[Any]:
    shown_tools = [] if chat.tool_choice == "none" else [tool.name for tool in chat.tools]
    return [chat.model_dump(include=PROMPT_SETTINGS), shown_tools]


def _message_without_cache_control(message: InputMessage) -> dict[str, Any]:
    fields = message.model_dump(exclude=MESSAGE_CACHE_CONTROL)
    if isinstance(message.content, str):
        fields["content"] = [{"type": "text", "text": message.content}]
    return fields
