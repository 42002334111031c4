"""Answers to /tokenize and /detokenize, ready to be sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from quire.engine.errors import InvalidRequest
from quire.engine.text.conversation.literal import encode_literally
from quire.engine.text.conversation.rendering import RenderedConversation
from quire.server.config import ServerConfig
from quire.server.encoding import encode_json
from quire.server.protocol.common import adapted_header, ignored_header
from quire.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.server.resolve.checks import check_text, check_token_ids
from quire.server.resolve.parse import parse
from quire.server.resolve.prompts import renderer_for, summary, with_images
from quire.server.resolve.tools import as_functions
from quire.server.served_model import ServedModel

Body = TypeVar("Body", TokenizeRequest, DetokenizeRequest)


@dataclass(frozen=True, slots=True)
class Reply:
    body: bytes
    """JSON."""
    headers: dict[str, str]


def tokenized(given: bytes, model: ServedModel, config: ServerConfig) -> Reply:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    body, headers = _asked(given, TokenizeRequest, model, config)
    conversation, special = _text(body, model, config)
    special = special if body.add_special_tokens is None else body.add_special_tokens
    ids = encode_literally(model.tokenizer, conversation.text, conversation.moved, add_special_tokens=special)
    strings = [model.tokenizer.token(token_id) for token_id in ids] if body.return_token_strs else None
    told = {"count": len(ids), "max_model_len": model.context_length, "tokens": ids, "token_strs": strings}
    if body.with_pieces:
        told["tokens"] = [{"id": each, "piece": _piece(model.tokenizer.token_bytes(each))} for each in ids]
    return Reply(encode_json(told), headers | adapted_header(summary(conversation)))


def templated(given: bytes, model: ServedModel, config: ServerConfig) -> Reply:
    """The text of a conversation. Raises as above."""
    body = parse(given, TokenizeRequest)
    model.answer_name(body.model)
    if body.messages is None:
        raise InvalidRequest(f"messages: field required{body.misspelt()}", param="messages")
    headers = ignored_header(body.ignored_params(), config.strict)
    conversation, _ = _text(body, model, config)
    return Reply(encode_json({"prompt": conversation.text}), headers | adapted_header(summary(conversation)))


def _asked(given: bytes, kind: type[Body], model: ServedModel, config: ServerConfig) -> tuple[Body, dict[str, str]]:
    """The body, and headers of the answer."""
    body = parse(given, kind)
    model.answer_name(body.model)
    return body, ignored_header(body.ignored_params(), config.strict)


def _text(body: TokenizeRequest, model: ServedModel, config: ServerConfig) -> tuple[RenderedConversation, bool]:
    """The text to be tokenized, and whether special tokens are added by default."""
    made, param, special = RenderedConversation(body.prompt or ""), "prompt", True
    if body.content is not None:
        made, param, special = RenderedConversation(body.content), "content", body.add_special
    elif body.messages is not None:
        param, special = "messages", False
        renderer = renderer_for(body.chat_template, model, trusted=config.trust_request_chat_template)
        made = renderer.render_conversation(
            [message.as_dict() for message in body.messages],
            tools=[spec.as_dict() for spec in as_functions(body.tools, None)],
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        made = replace(made, text=with_images(made.text, body.messages, model))
    check_text(made.text, param)
    return made, special


def _piece(text: bytes) -> str | list[int]:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)


def detokenized(given: bytes, model: ServedModel, config: ServerConfig) -> Reply:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    body, headers = _asked(given, DetokenizeRequest, model, config)
    check_token_ids(body.tokens, model.vocab_size, "tokens")
    text = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return Reply(encode_json({"prompt": text, "content": text}), headers)
