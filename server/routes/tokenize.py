"""POST /tokenize and /detokenize. Both run in a thread, because their inputs may be as long as any body."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import CountedRoute
from quire.server.encoding import encode_json
from quire.server.protocol.common import ignored_header
from quire.server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.server.resolve.checks import check_text, check_token_id
from quire.server.resolve.prompts import renderer_for
from quire.server.runtime import runtime_of
from quire.server.served_model import model_of

router = APIRouter(route_class=CountedRoute)


@router.post("/tokenize", response_model=None)
def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a prompt, or of a conversation as the chat template writes it."""
    model, config = model_of(request), runtime_of(request).config
    model.answer_name(body.model)
    headers = ignored_header(body.ignored_params(), config.strict)
    if body.messages is None:
        text, param, special = body.prompt or "", "prompt", True
    else:
        text = renderer_for(body.chat_template, model, trusted=config.trust_request_chat_template).render(
            [message.as_dict() for message in body.messages],
            tools=[spec.as_dict() for spec in body.tools],
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        param, special = "messages", False
    check_text(text, param)
    special = special if body.add_special_tokens is None else body.add_special_tokens
    ids = model.tokenizer.encode(text, add_special_tokens=special)
    strings = [model.tokenizer.token(token_id) for token_id in ids] if body.return_token_strs else None
    told = {"count": len(ids), "max_model_len": model.context_length, "tokens": ids, "token_strs": strings}
    return Response(encode_json(told), 200, headers, "application/json")


@router.post("/detokenize", response_model=None)
def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens shown."""
    model, config = model_of(request), runtime_of(request).config
    model.answer_name(body.model)
    headers = ignored_header(body.ignored_params(), config.strict)
    for token_id in body.tokens:
        check_token_id(token_id, model.vocab_size, "tokens")
    text = model.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return Response(encode_json({"prompt": text}), 200, headers, "application/json")
