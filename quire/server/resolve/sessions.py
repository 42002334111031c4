from __future__ import annotations

from functools import partial

from quire.engine.prefix_misses.recent_turns import Turn
from quire.server.config import ServerConfig
from quire.server.generation.response_writers.decisions import SessionWarmupWriter
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.request_bodies import ignored_params_header
from quire.server.protocol.stored_objects import WarmRequest
from quire.server.resolve.completions import resolve_completion_request
from quire.server.resolve.parse import parse_body
from quire.server.resolve.resolved_generation import AnswerForm, ResolvedGeneration
from quire.server.served_model import ServedModel


def parse_warm_request(body_bytes: bytes, model: ServedModel, config: ServerConfig) -> WarmRequest:
    body = parse_body(body_bytes or b"{}", WarmRequest)
    model.resolve_model_name(body.model)
    ignored_params_header(body.check_params_and_list_ignored(), config.strict)
    return body


def resolve_warm_request(
    session: str, turn: Turn, body: WarmRequest, model: ServedModel, config: ServerConfig
) -> ResolvedGeneration:
    """Generates one token, which is discarded. The conversation's KV blocks are kept for the body's session_ttl or,
    without it, for as long as the conversation's last request asked. Raises ModelNotFound if the adapter is gone.
    """
    ids = turn.token_ids[: model.context_length - 1]
    fields = {
        "model": turn.adapter or None,
        "prompt": ids,
        "max_tokens": 1,
        "temperature": 0.0,
        "cache_salt": body.cache_salt,
        "session_ttl": body.session_ttl or turn.keep_seconds or None,
    }
    form = AnswerForm(partial(SessionWarmupWriter, session), "cmpl-", allows_receipt=False)
    ignored = body.check_params_and_list_ignored()
    return resolve_completion_request(CompletionRequest.model_validate(fields), model, config, form, ignored=ignored)
