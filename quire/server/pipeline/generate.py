"""Sixth station: the engine computes what the request asks for."""

from __future__ import annotations

from starlette.requests import Request

from quire.server.access.admission import AdmissionTicket
from quire.server.generation.beam_search_generation import BeamSearchGeneration
from quire.server.generation.generation import Generation
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.generation.running_generation import RunningGeneration
from quire.server.generation.sampling_generation import SamplingGeneration
from quire.server.generation.vector_generation import VectorGeneration, VectorRequest
from quire.server.runtime.model_runtime import ModelRuntime, get_runtime


def submit_generation(resolved: GenerationRequest, runtime: ModelRuntime) -> Generation:
    """The generation that a request asks for, submitted to the engine. Raises EngineError if the engine is gone."""
    common = resolved, runtime.model.tokenizer, runtime.client, runtime.metrics, runtime.loop_work_pacer
    if resolved.beam_search:
        return BeamSearchGeneration(*common, context_length=runtime.model.context_length)
    return SamplingGeneration(*common)


def generate(request: Request, resolved: GenerationRequest, ticket: AdmissionTicket) -> RunningGeneration[Generation]:
    """Start a generation, which the caller must close. Settles the ticket at its end. Raises EngineError if the engine
    is gone."""
    runtime = get_runtime(request)
    try:
        generation = submit_generation(resolved, runtime)
    except Exception:
        ticket.settle_usage(0)
        raise
    running = RunningGeneration(generation)
    running.call_at_end(lambda: ticket.settle_usage(generation.usage.total_tokens))
    running.call_at_end(lambda: runtime.receipt_writer.log_answer(resolved, generation))
    return running


def compute_vectors(
    request: Request, resolved: VectorRequest, ticket: AdmissionTicket
) -> RunningGeneration[VectorGeneration]:
    """The same for vectors."""
    runtime = get_runtime(request)
    try:
        generation = VectorGeneration(resolved, runtime.client, runtime.metrics)
    except Exception:
        ticket.settle_usage(0)
        raise
    running = RunningGeneration(generation)
    running.call_at_end(lambda: ticket.settle_usage(resolved.prompt_tokens))
    return running
