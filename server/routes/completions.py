"""POST /v1/completions."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import GenerationRoute
from quire.server.generation.answers.completion import CompletionWriter
from quire.server.generation.answers.head import Head, new_id
from quire.server.generation.choice import Job
from quire.server.generation.prompts import completion_prompts
from quire.server.generation.sampling_params import check_logprobs, sampling_params
from quire.server.generation.structured import asked_grammar
from quire.server.protocol.common import ignored_header
from quire.server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from quire.server.routes.reply import reply
from quire.server.served_model import serving_of

router = APIRouter(route_class=GenerationRoute)


@router.post("/v1/completions", response_model=None)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue a prompt, or each of several."""
    serving = serving_of(request)
    model = serving.model_name(body.model)
    headers = ignored_header(body.ignored_params(), serving.config.strict)
    check_logprobs("logprobs", body.logprobs, serving.config.max_logprobs)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, serving.config.max_logprobs)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    echo_only = body.echo and max_tokens == 0
    params = sampling_params(
        body,
        serving,
        max_tokens=1 if echo_only else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_most(body.prompt_logprobs, body.logprobs if body.echo else None),
    )
    if body.num_generated > body.n:
        params = msgspec.structs.replace(params, n=body.num_generated, logprobs=body.logprobs or 0)
    params = msgspec.structs.replace(params, grammar=await serving.grammars.checked(asked_grammar(body)))
    prompts = await completion_prompts(body, serving)
    head = Head(new_id("cmpl"), model, serving.fingerprint)
    job = Job(head.id, body, prompts, params, body.echo, echo_only, keep=body.n)
    writer = CompletionWriter(head, serving.tokenizer, body, logprobs=body.logprobs is not None)
    return await reply(request, serving, job, writer, headers)


def _most(*counts: int | None) -> int | None:
    """The largest of those asked for."""
    return max((count for count in counts if count is not None), default=None)
