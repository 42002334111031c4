"""What the endpoints that generate resolve in the same way: the fields that completions and chat share."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from quire.engine.errors import InvalidRequest
from quire.engine.types import SamplingParams
from quire.server.access.tenants import Tenant
from quire.server.formats.message import MessageFormat
from quire.server.generation.spec import GenerationSpec, Prompt, RepetitionRule
from quire.server.protocol.common import GenerationBody


def resolved(
    body: GenerationBody,
    tenant: Tenant,
    *,
    id_prefix: str,
    model: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    logprobs: bool,
    headers: Mapping[str, str],
    message: MessageFormat | None = None,
    echo: bool = False,
    echo_only: bool = False,
) -> GenerationSpec:
    """The spec of a body whose prompts and parameters are resolved; `model` is the name for the answer.

    Raises InvalidRequest for beam search with a grammar.
    """
    if body.use_beam_search and params.grammar is not None:
        message_text = "use_beam_search is not available together with structured outputs"
        raise InvalidRequest(message_text, param="use_beam_search")
    return GenerationSpec(
        id=f"{id_prefix}-{secrets.token_hex(16)}",
        model=model,
        prompts=prompts,
        params=params,
        keep=body.n,
        tenant=tenant.name,
        weight=tenant.weight,
        priority=body.priority,
        cache_salt=tenant.salt(body.cache_salt),
        timeout=body.timeout,
        queue_timeout=body.queue_timeout,
        beam_search=body.use_beam_search,
        length_penalty=body.length_penalty,
        repetition=_repetition(body),
        message=message,
        stream=body.stream,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        echo=echo,
        echo_only=echo_only,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=body.return_token_ids,
        tokens_as_token_ids=body.return_tokens_as_token_ids,
        headers=headers,
    )


def _repetition(body: GenerationBody) -> RepetitionRule | None:
    rule = body.repetition_detection
    return None if rule is None else RepetitionRule(rule.max_pattern_size, rule.min_pattern_size, rule.min_count)
