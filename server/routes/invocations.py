"""POST /invocations: what SageMaker sends to a container, a chat, a completion or vectors as its body says."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.access.admission import GenerationRoute
from quire.server.generation.answers.chat import ChatWriter
from quire.server.generation.answers.completion import CompletionWriter
from quire.server.generation.answers.writer import ChunkWriter
from quire.server.generation.vectors import VectorSpec
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from quire.server.protocol.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from quire.server.resolve.invocations import resolve_invocation
from quire.server.routes.bodies import checked, documented, worked_on
from quire.server.routes.reply import reply
from quire.server.routes.vectors.reply import vectors_reply
from quire.server.served_model import model_of

router = APIRouter(route_class=GenerationRoute)
BODIES = (ChatRequest, CompletionRequest, EmbeddingRequest, RerankRequest, ScoreRequest)


@router.post("/invocations", response_model=None, openapi_extra=documented(*BODIES))
async def invoke(request: Request) -> Response:
    """A body with messages is /v1/chat/completions', one with a prompt /v1/completions', with an input /v1/embeddings'
    (or /classify's), with a query /v1/rerank's, with text_1 /v1/score's."""
    model = model_of(request)
    call = await worked_on(request, resolve_invocation)
    if isinstance(call, VectorSpec):
        return await vectors_reply(request, call)
    spec = await checked(request, call)
    writer: type[ChunkWriter] = ChatWriter if spec.id.startswith("chat") else CompletionWriter
    return await reply(request, spec, writer(spec, model.tokenizer, model.fingerprint))
