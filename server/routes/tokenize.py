"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.prompts import encode, renderer_for
from server.protocol.common import ignored_header
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from server.sampling import check_token_id
from server.serving import serving_of

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, response: Response) -> dict[str, Any]:
    """Token ids of a prompt, or of a conversation as the chat template writes it."""
    serving = serving_of(request)
    serving.model_name(body.model)
    response.headers.update(ignored_header(body.ignored_params(), serving.config.strict))
    if body.messages is None:
        text, param, special = body.prompt or "", "prompt", True
    else:
        text = renderer_for(body.chat_template, serving).render(
            [message.as_dict() for message in body.messages],
            tools=[spec.as_dict() for spec in body.tools],
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        param, special = "messages", False
    if body.add_special_tokens is not None:
        special = body.add_special_tokens
    (ids,) = await encode(serving.tokenizer, [text], special, param)
    strings = [serving.tokenizer.token(token_id) for token_id in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": serving.info.max_model_len, "tokens": ids, "token_strs": strings}


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request, response: Response) -> dict[str, Any]:
    """The text of token ids, special tokens shown."""
    serving = serving_of(request)
    serving.model_name(body.model)
    response.headers.update(ignored_header(body.ignored_params(), serving.config.strict))
    for token_id in body.tokens:
        check_token_id(token_id, serving.vocab_size, "tokens")
    return {"prompt": serving.tokenizer.decode(body.tokens, skip_special_tokens=False)}
