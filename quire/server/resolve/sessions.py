"""From a hint that a conversation's next turn is coming to the spec that brings the conversation into the cache."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.engine.prefixes.turns import Turn
from quire.server.config import ServerConfig
from quire.server.generation.answers.decisions import WarmedWriter
from quire.server.protocol.common import ignored_header
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.kept import WarmRequest
from quire.server.resolve.common import Resolved
from quire.server.resolve.completions import completion_call
from quire.server.resolve.parse import parse
from quire.server.served_model import ServedModel


def asked_warm(given: bytes, model: ServedModel, config: ServerConfig) -> tuple[WarmRequest, dict[str, str]]:
    """The body, and headers of the answer. Raises InvalidRequest, and ModelNotFound."""
    body = parse(given or b"{}", WarmRequest)
    model.answer_name(body.model)
    return body, ignored_header(body.ignored_params(), config.strict)


def warm_call(session: str, turn: Turn, body: WarmRequest, model: ServedModel, config: ServerConfig) -> Resolved:
    """The last turn as a prompt, for which one token is generated and thrown away. The engine recognises the
    conversation by its tokens, and keeps it as long as its last request asked. Raises ModelNotFound if its adapter is
    gone."""
    ids = turn.ids[: model.context_length - 1]
    wanted = {
        "model": turn.adapter or None,
        "prompt": ids,
        "max_tokens": 1,
        "temperature": 0.0,
        "cache_salt": body.cache_salt,
        "session_ttl": body.session_ttl or turn.keep_seconds or None,
    }
    writer = partial(WarmedWriter, session)
    call = completion_call(CompletionRequest.model_validate(wanted), model, config, writer=writer)
    return replace(call, receipts=False)
