"""Fifth station: whether there is room for a request, in the queue and within its key's limits."""

from __future__ import annotations

from starlette.requests import Request

from quire.server.access.admission import AdmissionTicket, admission_of
from quire.server.access.authentication import tenant_of
from quire.server.generation.resolved_request import ResolvedRequest
from quire.server.runtime.model_runtime import get_runtime
from quire.server.served_model import get_model


def admit(
    request: Request,
    resolved: ResolvedRequest,
    *,
    num_prompts: int,
    prompt_tokens: int,
    n: int = 1,
    max_tokens: int | None = None,
) -> AdmissionTicket:
    """A ticket, which whoever ends the work settles. From here on the request log knows the request by its answer's id.
    Raises what Admission.admit_generation raises."""
    ticket = admission_of(request).admit_generation(
        tenant_of(request.scope),
        num_prompts=num_prompts,
        prompt_tokens=prompt_tokens,
        n=n,
        max_tokens=max_tokens,
        priority=resolved.authorized_caller.priority,
    )
    model_name = get_model(request).names[0] if resolved.adapter is None else resolved.adapter.name
    get_runtime(request).request_log.register_answer_record(request.scope, resolved.id, resolved.answer_id, model_name)
    return ticket
