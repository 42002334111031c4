from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.engine.common.errors import InvalidRequest
from quire.server.config import ServerConfig
from quire.server.generation.vector_generation import VectorRequest
from quire.server.protocol.request_bodies import misspelling_hint
from quire.server.resolve.chat import resolve_chat
from quire.server.resolve.completions import resolve_completion
from quire.server.resolve.parse import read_json_object
from quire.server.resolve.pooling_requests import resolve_classification, resolve_embedding
from quire.server.resolve.resolved_generation import ResolvedGeneration
from quire.server.resolve.text_pairs import resolve_rerank, resolve_score
from quire.server.served_model import ServedModel

KIND_BY_FIELD = {
    "messages": "messages",
    "prompt": "prompt",
    "input": "input",
    "query": "query",
    "text_1": "text_1",
    "queries": "text_1",
}
RESOLVERS: Mapping[str, Callable[[bytes, ServedModel, ServerConfig], ResolvedGeneration | VectorRequest]] = {
    "messages": resolve_chat,
    "prompt": resolve_completion,
    "input": resolve_embedding,
    "query": resolve_rerank,
    "text_1": resolve_score,
}


def resolve_invocation(
    body_bytes: bytes, model: ServedModel, config: ServerConfig
) -> ResolvedGeneration | VectorRequest:
    """A body with input asks for embeddings or labels, depending on the model."""
    body = read_json_object(body_bytes)
    kinds = {kind for name, kind in KIND_BY_FIELD.items() if body.get(name) is not None}
    if len(kinds) != 1:
        hint = "" if kinds else misspelling_hint(body, KIND_BY_FIELD)
        raise InvalidRequest(f"give either messages or prompt, input, query or text_1{hint}", param="messages")
    (kind,) = kinds
    labels = "classify" in model.tasks and "embed" not in model.tasks
    resolve = resolve_classification if kind == "input" and labels else RESOLVERS[kind]
    return resolve(body_bytes, model, config)
