"""Compares prompts with those of earlier answers if a request asks for it."""

from __future__ import annotations

from starlette.requests import Request

from quire.server.access.authentication import owner_of
from quire.server.cache_diagnostics import CacheDiagnosis, PromptFingerprint
from quire.server.generation.resolved_request import GenerationRequest
from quire.server.runtime.server_context import get_runtime, get_server_context


async def diagnose_cache(request: Request, resolved: GenerationRequest) -> CacheDiagnosis:
    """Answers of other API keys, cache salts or APIs are not found."""
    if (fingerprint := _fingerprint_with_model(request, resolved)) is None:
        return CacheDiagnosis("unavailable")
    earlier = None
    if resolved.comparison_id.startswith(resolved.id_prefix):
        answer = owner_of(request), resolved.authorized_caller.cache_salt, resolved.comparison_id
        earlier = get_server_context(request).recent_prompts.find_prompt(*answer)
        if earlier is None:
            earlier = await get_runtime(request).cross_process_observer.find_peer_prompt(*answer)
    return CacheDiagnosis("not_found") if earlier is None else fingerprint.diagnose_change_from(earlier)


def record_prompt(request: Request, resolved: GenerationRequest) -> None:
    if (fingerprint := _fingerprint_with_model(request, resolved)) is not None:
        salt = resolved.authorized_caller.cache_salt
        recent_prompts = get_server_context(request).recent_prompts
        recent_prompts.add_prompt(owner_of(request), salt, resolved.answer_id, fingerprint)


def _fingerprint_with_model(request: Request, resolved: GenerationRequest) -> PromptFingerprint | None:
    runtime, adapter = get_runtime(request), resolved.adapter
    if resolved.fingerprint is None or not runtime.info.caches_prefixes:
        return None
    weights = runtime.client.engine_core.weights_version
    return resolved.fingerprint.with_model(runtime.model.names[0], weights, "" if adapter is None else adapter.digest)
