from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from quire.engine.common.errors import InvalidRequest
from quire.engine.text.conversation.conversation_renderer import RenderedConversation
from quire.engine.text.conversation.literal_encoding import encode_with_literal_texts
from quire.server.config import ServerConfig
from quire.server.encoding import encode_json
from quire.server.protocol.request_bodies import build_adapted_header, ignored_params_header
from quire.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.server.resolve.checks import check_no_surrogates, check_token_ids
from quire.server.resolve.parse import parse_body
from quire.server.resolve.prompts import adaptation_summary, expand_image_placeholders_in_text, select_renderer
from quire.server.resolve.tool_use import convert_to_functions
from quire.server.served_model import ServedModel

TokenizeBody = TypeVar("TokenizeBody", TokenizeRequest, DetokenizeRequest)


@dataclass(frozen=True, slots=True)
class JsonReply:
    body: bytes
    headers: dict[str, str]


def answer_tokenize(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> JsonReply:
    body, headers = _parse_request(body_bytes, TokenizeRequest, model, config)
    conversation, special = _text_to_tokenize(body, model, config)
    special = special if body.add_special_tokens is None else body.add_special_tokens
    ids = encode_with_literal_texts(
        model.tokenizer, conversation.text, conversation.moved_texts, add_special_tokens=special
    )
    strings = [model.tokenizer.id_to_token(token_id) for token_id in ids] if body.return_token_strs else None
    fields = {"count": len(ids), "max_model_len": model.context_length, "tokens": ids, "token_strs": strings}
    if body.with_pieces:
        fields["tokens"] = [{"id": each, "piece": _token_piece(model.tokenizer.token_bytes(each))} for each in ids]
    return JsonReply(encode_json(fields), headers | build_adapted_header(adaptation_summary(conversation)))


def answer_apply_template(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> JsonReply:
    body = parse_body(body_bytes, TokenizeRequest)
    model.resolve_model_name(body.model)
    if body.messages is None:
        raise InvalidRequest(f"messages: field required{body.misspelling_hint()}", param="messages")
    headers = ignored_params_header(body.check_params_and_list_ignored(), config.strict)
    conversation, _ = _text_to_tokenize(body, model, config)
    return JsonReply(
        encode_json({"prompt": conversation.text}), headers | build_adapted_header(adaptation_summary(conversation))
    )


def _parse_request(
    body_bytes: bytes, kind: type[TokenizeBody], model: ServedModel, config: ServerConfig
) -> tuple[TokenizeBody, dict[str, str]]:
    body = parse_body(body_bytes, kind)
    model.resolve_model_name(body.model)
    return body, ignored_params_header(body.check_params_and_list_ignored(), config.strict)


def _text_to_tokenize(
    body: TokenizeRequest, model: ServedModel, config: ServerConfig
) -> tuple[RenderedConversation, bool]:
    conversation = RenderedConversation(body.prompt or "")
    param = "prompt"
    special = True
    if body.content is not None:
        conversation = RenderedConversation(body.content)
        param = "content"
        special = body.add_special
    elif body.messages is not None:
        param, special = "messages", False
        renderer = select_renderer(body.chat_template, model, trusted=config.trust_request_chat_template)
        conversation = renderer.render_conversation(
            [message.to_template_message() for message in body.messages],
            tools=[spec.to_template_tool() for spec in convert_to_functions(body.tools, None)],
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        conversation = replace(
            conversation, text=expand_image_placeholders_in_text(conversation.text, body.messages, model)
        )
    check_no_surrogates(conversation.text, param)
    return conversation, special


def _token_piece(text: bytes) -> str | list[int]:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)


def answer_detokenize(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> JsonReply:
    body, headers = _parse_request(body_bytes, DetokenizeRequest, model, config)
    check_token_ids(body.tokens, model.vocab_size, "tokens")
    text = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return JsonReply(encode_json({"prompt": text, "content": text}), headers)
