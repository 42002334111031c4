"""Fifth station: checks for room in the queue and the API key's limits. Reserves tokens for the longest possible
answer. `generate.py` settles the ticket with the actual number.
"""

from __future__ import annotations

from starlette.requests import Request

from quire.server.access.admission import AdmissionTicket, admission_of
from quire.server.access.authentication import tenant_of
from quire.server.generation.resolved_request import GenerationRequest, ResolvedRequest
from quire.server.generation.vector_generation import VectorRequest
from quire.server.runtime.server_context import get_runtime
from quire.server.served_model import get_model


def admit(request: Request, resolved: GenerationRequest | VectorRequest) -> AdmissionTicket:
    """The caller must settle the ticket. Raises the errors of Admission.admit_generation."""
    n, max_tokens = 1, None
    if isinstance(resolved, GenerationRequest):
        n, max_tokens = resolved.params.n, resolved.params.max_tokens
    ticket = admission_of(request).admit_generation(
        tenant_of(request.scope),
        num_prompts=resolved.num_prompts,
        prompt_tokens=resolved.prompt_tokens,
        n=n,
        max_tokens=max_tokens,
        priority=resolved.authorized_caller.priority,
    )
    _register_answer(request, resolved)
    return ticket


def _register_answer(request: Request, resolved: ResolvedRequest) -> None:
    model_name = get_model(request).names[0] if resolved.adapter is None else resolved.adapter.name
    get_runtime(request).request_log.register_answer_record(request.scope, resolved.id, resolved.answer_id, model_name)
