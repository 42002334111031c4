"""What the scheduler decides for a step, and the step's result. Both are structs: they are sent to other processes."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from quire.engine.common.request_params import PoolingParams, SamplingParams
from quire.engine.common.types import ErrorCause, Image, MediaSpan, TokenLogprob


class NewRequestData(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that enters a slot of the device: its tokens so far, and how to sample more of them or to pool them."""

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams | PoolingParams
    seed: int
    adapter_slot: int = 0
    """The slot of its LoRA adapter; 0 for the base model."""
    spans: tuple[MediaSpan, ...] = ()
    images: tuple[Image, ...] = ()
    """The content of the spans, each image once."""
    cache_salt: str = ""
    """Encoder outputs are shared only among requests of the same cache salt."""


class EncoderChunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Part of the encoder's work on one image; it runs before the step's tokens are computed."""

    digest: bytes
    end_progress: int
    """Progress after this chunk, in units of Image.encoder_cost."""
    total_cost: int
    """Image.encoder_cost, the whole of it."""

    @property
    def is_last(self) -> bool:
        return self.end_progress == self.total_cost


class ScheduledRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's part in a step: tokens start to start + num_tokens of its slot. The device holds their ids.

    `new_block_ids` extend the slot's block table; a new request starts with an empty one. If `should_sample` is set,
    the device samples the token after the last one and writes it to the slot, so that a later step may compute it
    before the host knows it.

    `draft_token_ids` are the last of the `num_tokens` tokens. The device writes them to the slot, then samples a token
    at the position of each. The step returns the sampled tokens up to and including the first that differs from its
    draft; the KV of later drafts is overwritten.
    """

    request_id: str
    slot: int
    start: int
    num_tokens: int
    new_block_ids: list[int]
    should_sample: bool
    """Whether to sample after the last token. Always False for a pooling request: the device pools in the step that
    computes the prompt's last token."""
    draft_token_ids: list[int] = []
    encoder_chunks: list[EncoderChunk] = []
    """What the encoder computes for it in this step. A request may have these alone, with `num_tokens` 0."""


class HeadDraftRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request whose next tokens a head drafts from its hidden states, between two steps."""

    slot: int
    num_tokens: int
    """Its number of tokens; its last step sampled the last of them."""
    num_drafts: int
    """How many tokens to draft."""
    block_ids: list[int]
    """The head's own blocks, for all its tokens and the drafts."""


class DrafterCatchUp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a draft model has not computed of a request: `num_tokens` tokens from `start` on, with the blocks from
    `first_block` on. A slot keeps what it has until another request enters it."""

    slot: int
    start: int
    num_tokens: int
    token_ids: list[int]
    """Their ids; empty if `new_request` has them."""
    first_block: int
    block_ids: list[int]
    new_request: NewRequestData | None
    wants_draft: bool
    """Whether to draft a token after the last one."""


class DraftToken(NamedTuple):
    """A token that a model drafts."""

    token_id: int
    probability: float
    """As the draft model sees it."""


class BlockCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy the keys and values of the first `num_tokens` tokens of block `source` to block `target`, in every layer."""

    source: int
    target: int
    num_tokens: int


class SlotCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Copy the recurrent states of slot `source` to slot `target`, in every layer."""

    source: int
    target: int


class BlockLoadRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Blocks of a request's prefix that were loaded from a tier, before the step that first schedules the request."""

    request_id: str
    tier: str
    num_tokens: int
    began_at: float
    ended_at: float
    """Both in seconds of time.monotonic()."""


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one step computes. The scheduler makes it, an executor runs it; it never reaches the API process."""

    scheduled_requests: list[ScheduledRequest]
    new_requests: list[NewRequestData] = []
    block_copies: list[BlockCopy] = []
    """Made in this order, before anything is computed."""
    preempted_ids: list[str] = []
    """Requests that were preempted to make room for this step."""
    loaded_blocks: list[BlockLoadRecord] = []
    """Since the previous step."""
    adapter_loads: list[tuple[str, float]] = []
    """Adapters that were loaded into slots before it: name, and the seconds for which all requests waited."""
    freed_slots: list[int] = []
    """Slots that were freed since the previous step."""
    slot_copies: list[SlotCopy] = []
    """Made in this order, before any row is computed."""

    @property
    def without_encoder_only(self) -> SchedulerOutput:
        """Without the requests that have encoder chunks alone."""
        rows = [row for row in self.scheduled_requests if row.num_tokens]
        return (
            self
            if len(rows) == len(self.scheduled_requests)
            else msgspec.structs.replace(self, scheduled_requests=rows)
        )

    @property
    def has_prefill(self) -> bool:
        """Whether some request is in prefill; the others decode one token and verify its drafts."""
        return any(
            not row.should_sample or row.num_tokens > 1 + len(row.draft_token_ids) for row in self.scheduled_requests
        )

    @property
    def new_request_ids(self) -> list[str]:
        """Requests that are scheduled for the first time, or again after a preemption."""
        slots = {new_request.slot for new_request in self.new_requests}
        return [row.request_id for row in self.scheduled_requests if row.slot in slots] if slots else []


class RequestFailure(NamedTuple):
    """Why a request cannot be served any more."""

    message: str
    cause: ErrorCause = "engine"


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step computed, by request id."""

    token_ids: dict[str, list[int]]
    """For each request that samples: one token, and one more for each accepted draft."""
    logprobs: dict[str, list[TokenLogprob]] = {}
    """One per token, if the request asks for them."""
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    """For each prompt token of this step's chunk, the log probability of the token after it."""
    errors: dict[str, RequestFailure] = {}
    """These requests end."""
    vectors: dict[str, bytes] = {}
    """For pooling requests whose prompt is complete: float32, little-endian. These requests end."""
    used_cuda_graph: bool = False
    """Whether a CUDA graph computed it."""
