"""From a completion request to the spec of its generation."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.engine.errors import InvalidRequest
from quire.engine.text.no_tokenizer import check_textless
from quire.server.config import ServerConfig
from quire.server.generation.answers.chunks import CompletionWriter
from quire.server.generation.answers.writer import MakesWriter
from quire.server.protocol.common import ignored_header
from quire.server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from quire.server.resolve.answer_grammar import AnswerGrammar
from quire.server.resolve.checks import check_logprobs
from quire.server.resolve.common import Resolved, clipped_header, resolved, sampling_params
from quire.server.resolve.parse import parse
from quire.server.resolve.prompts import completion_prompts
from quire.server.resolve.structured import asked_grammar
from quire.server.resolve.tools import ToolUse
from quire.server.served_model import ServedModel


def resolve_completion(given: bytes, model: ServedModel, config: ServerConfig) -> Resolved:
    """Raises ModelNotFound, and InvalidRequest naming the parameter."""
    return completion_call(parse(given, CompletionRequest), model, config)


def completion_call(
    body: CompletionRequest,
    model: ServedModel,
    config: ServerConfig,
    *,
    writer: MakesWriter = CompletionWriter,
    ignored: Sequence[str] = (),
) -> Resolved:
    """Raises as above. `ignored`: more names of parameters without effect."""
    name = model.answer_name(body.model)
    headers = ignored_header([*ignored, *body.ignored_params()], config.strict)
    check_logprobs("logprobs", body.logprobs, config.max_logprobs, model.vocab_size)
    check_logprobs("prompt_logprobs", body.prompt_logprobs, config.max_logprobs, model.vocab_size)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    headers |= clipped_header(max_tokens, model)
    echo_only = body.echo and max_tokens == 0
    if echo_only and body.logprob_token_ids:
        message = "logprob_token_ids is about generated tokens, and echo with max_tokens 0 generates none"
        raise InvalidRequest(message, param="logprob_token_ids")
    params = sampling_params(
        body,
        model,
        config,
        max_tokens=1 if echo_only else max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=_most(body.prompt_logprobs, body.logprobs if body.echo else None),
    )
    if body.num_generated > body.n:
        params = msgspec.structs.replace(params, n=body.num_generated, logprobs=body.logprobs or 0)
    asked = asked_grammar(body, config)
    answer = AnswerGrammar(ToolUse(), asked, framed=False)
    check_textless(model.tokenizer, stop=params.stop, structured_outputs=asked)
    prompts = completion_prompts(body, model)
    return resolved(
        body,
        writer=writer,
        id_prefix="cmpl-",
        model=name,
        prompts=prompts,
        params=params,
        logprobs=body.logprobs is not None,
        headers={**headers, **answer.headers()},
        config=config,
        echo=body.echo,
        echo_only=echo_only,
        grammars=answer.grammars(model),
    )


def _most(*counts: int | None) -> int | None:
    """The largest of those asked for."""
    return max((count for count in counts if count is not None), default=None)
