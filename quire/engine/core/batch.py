"""What the scheduler decides for a step, and the step's result: structs, so that they can be sent to processes."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from quire.engine.types import Cause, Image, PoolingParams, SamplingParams, Span, TokenLogprob


class Admission(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence is put into a slot of the device: its tokens so far, and how to sample more or to pool them."""

    slot: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams | PoolingParams
    seed: int
    adapter: int = 0
    """The slot of its adapter; 0: none."""
    spans: tuple[Span, ...] = ()
    images: tuple[Image, ...] = ()
    """The content of each span, once."""
    salt: str = ""
    """Features are shared only with requests of the same salt."""


class Look(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of reading an image, before a step's tokens are computed."""

    digest: bytes
    until: int
    """How far it is read then,"""
    of: int
    """of so much: Image.work."""

    @property
    def ends(self) -> bool:
        return self.until == self.of


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sequence's share of a step: tokens start to start + count of its slot, whose token ids the device holds.

    `new_blocks` extend the slot's block table (an admitted slot starts with an empty one). A row that samples picks a
    token after its last one; the device writes it to the slot, so a later row may compute it before the host knows it.

    `draft_ids` are guesses of the tokens that follow the known ones: they are the last of the row's `count` tokens, and
    the device writes them to the slot first. It then picks a token for the place of each of them too. The row
    gives the picks up to and including the first that differs from its draft; what was computed for later drafts is
    overwritten later.
    """

    request_id: str
    slot: int
    start: int
    count: int
    new_blocks: list[int]
    sample: bool
    """Whether to pick a token after the row's last one. Always False for PoolingParams, for which the device makes the
    vector in the row that ends with the prompt's last token."""
    draft_ids: list[int] = []
    looks: list[Look] = []
    """What of its images is read in this step. A row may have no more than that, and a `count` of 0."""


class DraftRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence whose next tokens are guessed from its hidden states, between two steps."""

    slot: int
    known: int
    """Its tokens. Its last step picked the last one of them."""
    count: int
    """Tokens to guess."""
    blocks: list[int]
    """The heads' pages of all its tokens and the guesses."""


class CatchUp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a model that drafts lacks of a sequence: the `count` tokens from `start` on, and the pages from its
    `first_page` on. A slot keeps what it has until another sequence is admitted to it."""

    slot: int
    start: int
    count: int
    token_ids: list[int]
    """These tokens; empty where an admission brings them."""
    first_page: int
    pages: list[int]
    admission: Admission | None
    wants_guess: bool
    """Whether to guess a token after the last one."""


class Drafted(NamedTuple):
    """A token that a model guesses."""

    token: int
    chance: float
    """How likely that model holds it."""


class PageCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The keys and values of the first `tokens` tokens of page `source` go to page `target` too, in every layer."""

    source: int
    target: int
    tokens: int


class SlotCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What layers keep in slot `source` beside pages goes to slot `target` too, in every layer."""

    source: int
    target: int


class Fetched(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Pages of a request's prefix that came back from a tier, before the step that admits the request."""

    request_id: str
    tier: str
    tokens: int
    began: float
    ended: float
    """Both in seconds of time.monotonic()."""


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step computes. The scheduler decides it, an executor computes it; it never reaches the API process."""

    rows: list[Row]
    admissions: list[Admission] = []
    copies: list[PageCopy] = []
    """Made in this order, before any row is computed."""
    preempted: list[str] = []
    """Ids of the requests that were preempted to make room for this step."""
    fetched: list[Fetched] = []
    """What came back from tiers since the step before."""
    loads: list[tuple[str, float]] = []
    """Names of the adapters that were put into slots before it, each with the seconds for which all waited for that."""
    left: list[int] = []
    """Slots whose owners have left since the step before."""
    slot_copies: list[SlotCopy] = []
    """Made in this order, before any row is computed."""

    @property
    def computed(self) -> Batch:
        """Without the rows that have no tokens."""
        rows = [row for row in self.rows if row.count]
        return self if len(rows) == len(self.rows) else msgspec.structs.replace(self, rows=rows)

    @property
    def has_prompts(self) -> bool:
        """Whether some rows are parts of prompts, not a token, and its guesses, of a sequence that goes on."""
        return any(not row.sample or row.count > 1 + len(row.draft_ids) for row in self.rows)

    @property
    def admitted_ids(self) -> list[str]:
        """The requests that are in a step for the first time, or again after a preemption."""
        slots = {admission.slot for admission in self.admissions}
        return [row.request_id for row in self.rows if row.slot in slots] if slots else []


class Failure(NamedTuple):
    """Why a request cannot be served any more."""

    message: str
    cause: Cause = "engine"


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step computed, by request id."""

    token_ids: dict[str, list[int]]
    """For each row that samples the tokens it accepts: one, and one more for each accepted draft."""
    logprobs: dict[str, list[TokenLogprob]] = {}
    """One per accepted token, where the request asks for them."""
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    """For the prompt tokens of this step's chunk: the log probability of the token after each."""
    errors: dict[str, Failure] = {}
    """These requests end."""
    vectors: dict[str, bytes] = {}
    """For the requests with PoolingParams whose prompt is complete: float32, little-endian. They end."""
    captured: bool = False
    """Whether a CUDA graph computed it."""
