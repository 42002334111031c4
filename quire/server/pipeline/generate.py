"""Sixth station: submits the request to the engine. A generation only reads engine outputs. Wrappers of these outputs
add, in this order: an earlier attempt's tokens (`DurableRequest.submit`), deadlines, the receipt recorder.
"""

from __future__ import annotations

from starlette.requests import Request

from quire.engine.client.output_stream import OutputSource
from quire.engine.receipts.receipt_recorder import ReceiptRecorder
from quire.server.access.admission import AdmissionTicket
from quire.server.durability.durable_request import DurableRequest
from quire.server.generation.beam_search_generation import BeamSearchGeneration
from quire.server.generation.deadlines import OutputsWithDeadlines
from quire.server.generation.generation import Generation, RunningGeneration
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.generation.sampling_generation import SamplingGeneration
from quire.server.generation.vector_generation import VectorGeneration, VectorRequest
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.server_context import get_runtime


def submit_generation(
    resolved: GenerationRequest, runtime: ModelRuntime, durable: DurableRequest
) -> RunningGeneration[Generation]:
    """The caller must close the result. Raises EngineError if the engine has ended."""
    if resolved.beam_search:
        search = BeamSearchGeneration(
            resolved,
            runtime.model.tokenizer,
            runtime.client,
            runtime.metrics,
            runtime.loop_work_pacer,
            context_length=runtime.model.context_length,
        )
        return RunningGeneration(search)
    requests = resolved.engine_requests()
    recorder: ReceiptRecorder | None = None
    outputs: OutputSource = durable.submit(runtime.client, resolved, requests)
    try:
        if resolved.has_deadline:
            outputs = OutputsWithDeadlines(outputs, resolved)
        if resolved.authorized_caller.record_receipt:
            outputs = recorder = ReceiptRecorder(outputs, requests)
        timeline = runtime.client.history.find_timeline(requests[0].id) if resolved.include_metrics else None
        generation = SamplingGeneration(
            resolved,
            runtime.model.tokenizer,
            requests,
            outputs,
            runtime.metrics,
            runtime.loop_work_pacer,
            timeline,
        )
    except BaseException:
        outputs.close()
        raise
    return RunningGeneration(generation, recorder)


def generate(
    request: Request, resolved: GenerationRequest, ticket: AdmissionTicket, durable: DurableRequest
) -> RunningGeneration[Generation]:
    """The caller must close the result, which settles the ticket. Raises EngineError if the engine has ended."""
    runtime = get_runtime(request)
    try:
        running = submit_generation(resolved, runtime, durable)
    except Exception:
        ticket.settle_usage(0)
        raise
    running.call_at_end(lambda: ticket.settle_usage(running.generation.usage.total_tokens))
    if resolved.authorized_caller.record_receipt:
        running.call_at_end(lambda: runtime.receipt_writer.log_answer(resolved, running))
    return running


def compute_vectors(
    request: Request, resolved: VectorRequest, ticket: AdmissionTicket
) -> RunningGeneration[VectorGeneration]:
    runtime = get_runtime(request)
    try:
        outputs: OutputSource = runtime.client.submit(resolved.engine_requests(), resolved.answer_id)
        if resolved.has_deadline:
            outputs = OutputsWithDeadlines(outputs, resolved)
        generation = VectorGeneration(resolved, outputs, runtime.metrics)
    except Exception:
        ticket.settle_usage(0)
        raise
    running = RunningGeneration(generation)
    running.call_at_end(lambda: ticket.settle_usage(resolved.prompt_tokens))
    return running
