"""Answers to /tokenize and /detokenize, ready to be sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from quire.engine.errors import InvalidRequest
from quire.server.config import ServerConfig
from quire.server.encoding import encode_json
from quire.server.protocol.common import ignored_header
from quire.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.server.resolve.checks import check_text, check_token_ids
from quire.server.resolve.parse import parse
from quire.server.resolve.prompts import renderer_for, with_images
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
    text, special = _text(body, model, config)
    special = special if body.add_special_tokens is None else body.add_special_tokens
    ids = model.tokenizer.encode(text, add_special_tokens=special)
    strings = [model.tokenizer.token(token_id) for token_id in ids] if body.return_token_strs else None
    told = {"count": len(ids), "max_model_len": model.context_length, "tokens": ids, "token_strs": strings}
    if body.with_pieces:
        told["tokens"] = [{"id": each, "piece": _piece(model.tokenizer.token_bytes(each))} for each in ids]
    return Reply(encode_json(told), headers)


def templated(given: bytes, model: ServedModel, config: ServerConfig) -> Reply:
    """The text of a conversation. Raises as above."""
    body = parse(given, TokenizeRequest)
    model.answer_name(body.model)
    if body.messages is None:
        raise InvalidRequest(f"messages: field required{body.misspelt()}", param="messages")
    headers = ignored_header(body.ignored_params(), config.strict)
    return Reply(encode_json({"prompt": _text(body, model, config)[0]}), headers)


def _asked(given: bytes, kind: type[Body], model: ServedModel, config: ServerConfig) -> tuple[Body, dict[str, str]]:
    """The body, and headers of the answer."""
    body = parse(given, kind)
    model.answer_name(body.model)
    return body, ignored_header(body.ignored_params(), config.strict)


def _text(body: TokenizeRequest, model: ServedModel, config: ServerConfig) -> tuple[str, bool]:
    """The text to be tokenized, and whether special tokens are added by default."""
    text, param, special = body.prompt or "", "prompt", True
    if body.content is not None:
        text, param, special = body.content, "content", body.add_special
    elif body.messages is not None:
        param, special = "messages", False
        text = renderer_for(body.chat_template, model, trusted=config.trust_request_chat_template).render(
            [message.as_dict() for message in body.messages],
            tools=[spec.as_dict() for spec in as_functions(body.tools, None)],
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        text = with_images(text, body.messages, model)
    check_text(text, param)
    return text, special


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
