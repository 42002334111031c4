from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from quire.server.durability.durable_request import DurableRequest
from quire.server.generation.generation import Generation, RunningGeneration
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.generation.response_writers.answer_writer import AnswerWriter
from quire.server.generation.vector_generation import VectorRequest
from quire.server.pipeline.admit import admit
from quire.server.pipeline.authorize import authorize, identify, open_durable_request
from quire.server.pipeline.cache_diagnosis import diagnose_cache, record_prompt
from quire.server.pipeline.generate import compute_vectors, generate
from quire.server.pipeline.resolve import Resolver, check_grammars, resolve_body
from quire.server.pipeline.write import EndCallback, do_nothing, write_answer, write_vectors
from quire.server.resolve.resolved_generation import ResolvedGeneration
from quire.server.resolve.tokenize_requests import JsonReply
from quire.server.runtime.server_context import get_runtime
from quire.server.served_model import get_model

Resolution = ResolvedGeneration | VectorRequest | JsonReply


async def answer(request: Request, resolve: Resolver[Resolution]) -> Response:
    """Raises InvalidRequest, Overloaded and other errors of the stations."""
    durable = open_durable_request(request)
    resolution = await resolve_body(request, resolve, durable.keep_body if durable.keeps_body else None)
    if isinstance(resolution, JsonReply):
        return Response(resolution.body, 200, resolution.headers, "application/json")
    if isinstance(resolution, VectorRequest):
        return await answer_with_vectors(request, resolution)
    return await answer_with_text(request, resolution, durable)


async def answer_with_vectors(request: Request, resolved: VectorRequest) -> Response:
    resolved = authorize(request, resolved)
    resolved = resolved.with_identity(identify(resolved))
    running = compute_vectors(request, resolved, admit(request, resolved))
    return await write_vectors(request, running, resolved)


async def answer_with_text(request: Request, resolution: ResolvedGeneration, durable: DurableRequest) -> Response:
    resolved = await prepare_generation(request, resolution, durable)
    if resolved.questions:
        get_runtime(request).metrics.count_questions_by_type(question.type for question in resolved.questions)
    model = get_model(request)
    writer = resolution.form.writer(resolved, model.tokenizer, model.fingerprint)
    return await generate_and_write(request, resolved, writer, durable)


async def generate_and_write(
    request: Request,
    resolved: GenerationRequest,
    writer: AnswerWriter,
    durable: DurableRequest,
    on_written: EndCallback = do_nothing,
) -> Response:
    reader_grace = durable.reader_grace_seconds(resolved)
    running = await begin_generation(request, resolved, durable)
    return await write_answer(request, running, writer, durable, on_written, reader_grace=reader_grace)


async def prepare_generation(
    request: Request, resolution: ResolvedGeneration, durable: DurableRequest
) -> GenerationRequest:
    resolved = authorize(request, await check_grammars(request, resolution))
    fresh = identify(resolved)
    if resolved.comparison_id:
        fresh = replace(fresh, cache_diagnosis=await diagnose_cache(request, resolved))
    return resolved.with_identity(await durable.identify(resolved, fresh))


async def begin_generation(
    request: Request, resolved: GenerationRequest, durable: DurableRequest
) -> RunningGeneration[Generation]:
    """The caller must close the result."""
    running = generate(request, resolved, admit(request, resolved), durable)
    if resolved.fingerprint is not None:
        record_prompt(request, resolved)
    await durable.persist(resolved, running)
    return running
