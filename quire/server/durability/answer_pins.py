from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.engine.common import random_source
from quire.engine.common.types import MediaSpan
from quire.server.durability.journal import JournaledCall
from quire.server.generation.resolved_request import AnswerIdentity, GenerationRequest


@dataclass(frozen=True, slots=True)
class ResumedCall:
    call: JournaledCall
    seen_events: Sequence[int]
    attempt: int
    """Unique number of this attempt; 0 for a background response that is read from the store."""


@dataclass(frozen=True, slots=True)
class ComputeIdentity:
    fingerprint: str
    deterministic: bool
    """True if tokens do not depend on other requests."""
    weights_fingerprint: str
    """An answer can continue only with equal weights."""


def pin_identity(
    request: GenerationRequest, fresh: AnswerIdentity, resumed: ResumedCall | None, *, has_key: bool, is_journaled: bool
) -> AnswerIdentity:
    """A seed is added to `fresh`, so that the answer can be recomputed, unless the request is a beam search or
    `is_journaled` is False. `is_journaled`: tokens are reproducible, or all are logged.
    """
    resumable = _is_resumable(request, has_key=has_key)
    if resumed is not None:
        pins = resumed.call.pins
        return AnswerIdentity(
            id=pins.id,
            requested_id=pins.name,
            created=pins.created,
            seed=pins.seed,
            resumable=resumable,
            num_earlier_attempts=resumed.attempt,
            cache_diagnosis=pins.cache_diagnosis,
        )
    if request.beam_search or not is_journaled:
        return fresh
    seed = random_source.randbits(63) if fresh.seed is None else fresh.seed
    return replace(fresh, seed=seed, resumable=resumable)


def _is_resumable(request: GenerationRequest, *, has_key: bool) -> bool:
    if request.beam_search:
        return False
    return has_key or request.stream or (request.responses_fields is not None and request.responses_fields.background)


def input_digest(request: GenerationRequest, identity: ComputeIdentity) -> str:
    digest = hashlib.blake2b(identity.weights_fingerprint.encode(), digest_size=12)
    for prompt in request.prompts:
        digest.update(b"%d:" % len(prompt.ids))
        digest.update(array("I", prompt.ids).tobytes())
        for span in prompt.spans:
            digest.update(_span_digest_text(span).encode())
    return digest.hexdigest()


def _span_digest_text(span: MediaSpan) -> str:
    """The format must not change, even if names in the code do, because the journal contains digests of it."""
    position_text = f"start={span.start!r}, count={span.count!r}, digest={span.digest!r}"
    return f"Span({position_text}, kind={span.kind!r}, whole={span.is_bidirectional!r}, offset={span.offset!r})"


def all_compute_fingerprints(resumed: ResumedCall, identity: ComputeIdentity) -> tuple[str, ...]:
    pins = resumed.call.pins
    return (*pins.before, pins.kernels) + ((identity.fingerprint,) if pins.kernels != identity.fingerprint else ())


def may_compute_other_tokens(resumed: ResumedCall, identity: ComputeIdentity) -> bool:
    """If True, the call continues after its journaled tokens."""
    return resumed.call.pins.kernels != identity.fingerprint or not identity.deterministic


def resume_conflict(resumed: ResumedCall, request: GenerationRequest, identity: ComputeIdentity) -> str | None:
    pins = resumed.call.pins
    if pins.adapter != ("" if request.adapter is None else request.adapter.digest):
        return "The adapter of this answer has been changed since"
    if may_compute_other_tokens(resumed, identity):
        if pins.given != input_digest(request, identity):
            return "The model of this answer has been changed since: ask for a new one"
        recomputes_logprobs = request.logprobs or request.prompt_logprobs is not None
        if request.beam_search or (recomputes_logprobs and resumed.call.progress.num_tokens):
            return "All of this answer would have to be recomputed, and this configuration may not reproduce it"
    if resumed.seen_events and len(resumed.seen_events) != request.num_choices + 2:
        return "Last-Event-ID is not the id of an event of this stream"
    return None
