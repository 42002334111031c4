"""What the answer of a call depends on, so that it can be made again or go on."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced

import msgspec

from quire.engine import random_source
from quire.engine.types import Span
from quire.server.generation.spec import GenerationSpec
from quire.server.store.calls import Call


@dataclass(frozen=True, slots=True)
class Resumed:
    """A call that is made again."""

    call: Call
    seen: Sequence[int]
    """Events that its reader has; see answers/numbered.py."""
    attempt: int
    """The number of this attempt, which no other has; 0 for a background response, whose answer is stored instead."""


@dataclass(frozen=True, slots=True)
class Here:
    """What computes in this process."""

    fingerprint: str
    deterministic: bool
    """Whether tokens depend on nothing but their request."""
    weights: str
    """What the fingerprint says of the weights alone: with others, no answer goes on."""


def pinned(spec: GenerationSpec, resumed: Resumed | None, *, keyed: bool, kept: bool) -> GenerationSpec:
    """The spec with everything that its answer depends on besides the request: what the journal noted, for a call that
    is made again, else values of its own.

    keyed: whether it has an Idempotency-Key. kept: whether it can be resumed, because its tokens are the same when they
    are computed again, or because the journal has all of them.
    """
    if resumed is not None:
        pins = resumed.call.pins
        return replaced(
            spec,
            id=pins.id,
            name=pins.name,
            created=pins.created,
            params=msgspec.structs.replace(spec.params, seed=pins.seed),
            resumable=_resumable(spec, keyed=keyed),
            progress=resumed.call.progress,
            attempt=resumed.attempt,
        )
    if spec.beam_search or not kept:
        return spec
    seed = spec.params.seed
    params = msgspec.structs.replace(spec.params, seed=random_source.randbits(63) if seed is None else seed)
    return replaced(spec, params=params, resumable=_resumable(spec, keyed=keyed))


def _resumable(spec: GenerationSpec, *, keyed: bool) -> bool:
    if spec.beam_search:
        return False
    return keyed or spec.stream or (spec.response is not None and spec.response.background)


def given(spec: GenerationSpec, here: Here) -> str:
    """Digest of the weights and of the prompts as the model reads them."""
    digest = hashlib.blake2b(here.weights.encode(), digest_size=12)
    for prompt in spec.prompts:
        digest.update(b"%d:" % len(prompt.ids))
        digest.update(array("I", prompt.ids).tobytes())
        for span in prompt.spans:
            digest.update(_written(span).encode())
    return digest.hexdigest()


def _written(span: Span) -> str:
    """What the journal's digests have of an image's tokens; it stays as it is, whatever our names become."""
    place = f"start={span.start!r}, count={span.count!r}, digest={span.digest!r}"
    return f"Span({place}, kind={span.kind!r}, whole={span.whole!r}, offset={span.offset!r})"


def computed_by(resumed: Resumed, here: Here) -> tuple[str, ...]:
    """The fingerprints of all that compute a call, in their order."""
    pins = resumed.call.pins
    return (*pins.before, pins.kernels) + ((here.fingerprint,) if pins.kernels != here.fingerprint else ())


def moved(resumed: Resumed, here: Here) -> bool:
    """Whether this process might compute other tokens than the one where the call began: its kernels or weights differ,
    or it is not deterministic. Then the call keeps the tokens that it has, and goes on behind them."""
    return resumed.call.pins.kernels != here.fingerprint or not here.deterministic


def why_not_again(resumed: Resumed, spec: GenerationSpec, here: Here) -> str | None:
    """Why a call that is made again would have another answer than it had; None: it has the same, or goes on."""
    pins = resumed.call.pins
    if pins.adapter != ("" if spec.adapter is None else spec.adapter.digest):
        return "The adapter of this answer has been changed since"
    if moved(resumed, here):
        if pins.given != given(spec, here):
            return "The model of this answer has been changed since: ask for a new one"
        again = spec.logprobs or spec.prompt_logprobs is not None
        if spec.beam_search or (again and resumed.call.progress.count):
            return "All of this answer would be computed again, and what computes it does not give the same: ask anew"
    if resumed.seen and len(resumed.seen) != spec.num_choices + 2:
        return "Last-Event-ID is the id of no event of this stream"
    return None
