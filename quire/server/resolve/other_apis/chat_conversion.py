"""Converts other APIs' bodies to chats. Errors use the API's field names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quire.engine.common.errors import InvalidRequest
from quire.engine.images.image_decoding import param_of_field_path
from quire.engine.text.conversation.literal_encoding import encode_with_literal_texts
from quire.server.config import ServerConfig
from quire.server.images.image_parts import UnfetchedImagesError
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.request_bodies import build_adapted_header
from quire.server.resolve.checks import check_no_surrogates
from quire.server.resolve.prompts import adaptation_summary, expand_image_placeholders_in_text, render_chat
from quire.server.resolve.tool_use import resolve_request_tools
from quire.server.served_model import ServedModel

CallerFields = dict[str, str]
"""Maps the chat's field paths to the caller's."""
ChatTurn = dict[str, Any]
FIELD_KEY = "\0field"
"""Key for the caller's field in turns and parts, until `merge_user_turns` removes it. Fields of the API have no such
name.
"""


@contextmanager
def rename_fields_in_raised_errors(names: Mapping[str, str]) -> Iterator[CallerFields]:
    """`merge_user_turns` fills the yielded dict."""
    caller_fields: CallerFields = {}
    try:
        yield caller_fields
    except UnfetchedImagesError as needed:
        needed.fields_by_url = {url: caller_fields.get(place, place) for url, place in needed.fields_by_url.items()}
        raise
    except InvalidRequest as error:
        place, _, why = error.message.partition(": ")
        if place in caller_fields:
            error.message, error.param = f"{caller_fields[place]}: {why}", param_of_field_path(caller_fields[place])
        else:
            error.message = rename_fields_in_error_text(error.message, error.param, names)
            error.param = names.get(error.param or "", error.param)
        error.args = (error.message,)
        raise


def rename_adaptation_fields(adapted: str, caller_fields: Mapping[str, str]) -> str:
    return re.sub(r"messages\[\d+\]", lambda match: caller_fields.get(match[0], match[0]), adapted)


def rename_fields_in_error_text(message: str, param: str | None, names: Mapping[str, str]) -> str:
    """Names without a dot may be ordinary words of the message."""
    for name, caller_name in names.items():
        if name == param or "." in name:
            message = re.sub(rf"\b{re.escape(name)}\b", caller_name, message)
    return message


def image_content_part(url: str, field: str, **more: str) -> ChatTurn:
    return {"type": "image_url", "image_url": {"url": url, **more}, FIELD_KEY: field}


def extend_or_add_turn(turns: list[ChatTurn], role: str, parts: Sequence[ChatTurn]) -> None:
    if not turns or turns[-1]["role"] != role:
        turns.append({"role": role, "content": []})
    turns[-1]["content"] += parts


def record_caller_field(turns: Sequence[ChatTurn], field: str) -> None:
    for turn in reversed(turns):
        if FIELD_KEY in turn:
            return
        turn[FIELD_KEY] = field


def tool_result_turn(call_id: str, content: str | list[ChatTurn], names: Mapping[str, str]) -> ChatTurn:
    turn = {"role": "tool", "tool_call_id": call_id, "content": content}
    return {**turn, "name": names[call_id]} if call_id in names else turn


def merge_user_turns(turns: Sequence[ChatTurn], caller_fields: CallerFields) -> list[ChatTurn]:
    merged: list[ChatTurn] = []
    for turn in turns:
        if turn["role"] == "user" and merged and merged[-1]["role"] == "user":
            merged[-1] = {**merged[-1], "content": [*merged[-1]["content"], *turn["content"]]}
        else:
            merged.append(dict(turn))
    for index, turn in enumerate(merged):
        if field := turn.pop(FIELD_KEY, None):
            caller_fields[f"messages[{index}]"] = field
        for place, part in enumerate(turn["content"] if isinstance(turn["content"], list) else ()):
            if field := part.pop(FIELD_KEY, None):
                caller_fields[f"messages[{index}].content[{place}].image_url.url"] = field
    return merged


def count_chat_tokens(
    chat: ChatRequest, model: ServedModel, config: ServerConfig, caller_fields: CallerFields
) -> tuple[int, dict[str, str]]:
    template_tools = resolve_request_tools(chat, model.chat_formats.tool_format).template_tools
    conversation = render_chat(chat, model, template_tools, trusted=config.trust_request_chat_template)
    text = expand_image_placeholders_in_text(conversation.text, chat.messages, model)
    check_no_surrogates(text, "messages")
    ids = encode_with_literal_texts(
        model.tokenizer, text, conversation.moved_texts, add_special_tokens=chat.add_special_tokens
    )
    return len(ids), build_adapted_header(rename_adaptation_fields(adaptation_summary(conversation), caller_fields))
