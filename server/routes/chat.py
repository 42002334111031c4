"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.answers.chat import ChatWriter
from server.answers.head import Head, new_id
from server.generate import Job
from server.prompts import chat_prompt
from server.protocol.chat import ChatRequest
from server.protocol.common import ignored_header
from server.routes.reply import reply
from server.sampling import check_logprobs, sampling_params
from server.serving import serving_of

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    serving = serving_of(request)
    model = serving.model_name(body.model)
    headers = ignored_header(body.ignored_params(), serving.config.strict)
    check_logprobs("top_logprobs", body.top_logprobs, serving.config.max_logprobs)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, serving.config.max_logprobs)
    params = sampling_params(
        body,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=body.top_logprobs if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        tokenizer=serving.tokenizer,
        defaults=serving.defaults,
        max_model_len=serving.info.max_model_len,
        vocab_size=serving.vocab_size,
    )
    prompt = await chat_prompt(body, serving)
    head = Head(new_id("chatcmpl"), model, serving.fingerprint)
    job = Job(
        head.id,
        [prompt],
        params,
        return_token_ids=body.return_token_ids,
        prompt_logprobs=body.prompt_logprobs,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )
    writer = ChatWriter(
        head,
        serving.tokenizer,
        logprobs=body.logprobs,
        include_usage=body.include_usage,
        tokens_as_token_ids=body.return_tokens_as_token_ids,
    )
    return await reply(
        request, serving, job, writer, stream=body.stream, headers=headers, continuous_usage=body.continuous_usage
    )
