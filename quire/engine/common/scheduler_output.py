"""A step's decisions and results."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from quire.engine.common.request_params import PoolingParams, SamplingParams
from quire.engine.common.types import ErrorCause, Image, MediaSpan, TokenLogprob

DRAFT_SOURCES = ("model", "lookup", "grammar")
"""Where draft tokens come from: a draft model or heads, an n-gram or suffix match, or a grammar."""


class NewRequestData(msgspec.Struct, frozen=True, array_like=True, gc=False):
    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams | PoolingParams
    seed: int
    adapter_slot: int = 0
    """0 means the base model."""
    spans: tuple[MediaSpan, ...] = ()
    images: tuple[Image, ...] = ()
    """All images of `spans`, each one once."""
    cache_salt: str = ""
    """Only requests with the same salt share encoder outputs."""


class EncoderChunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    digest: bytes
    end_progress: int
    """Encoder progress after this chunk, in units of Image.encoder_cost."""
    total_cost: int

    @property
    def is_last(self) -> bool:
        return self.end_progress == self.total_cost


class ScheduledRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens from `start` to `start + num_tokens` of a slot. The device has their ids.

    `new_block_ids` extend the slot's block table, which is empty for a new request. With `should_sample`, the device
    samples the next token and writes it to the slot, so that a later step can compute it before the host has seen it.

    `draft_token_ids` are the last of the `num_tokens` tokens. The device samples at each of their positions. The step
    returns sampled tokens up to and including the first that differs from its draft.
    """

    request_id: str
    slot: int
    start: int
    num_tokens: int
    new_block_ids: list[int]
    should_sample: bool
    """False for pooling requests, which are pooled in the step that computes the prompt's last token."""
    draft_token_ids: list[int] = []
    encoder_chunks: list[EncoderChunk] = []
    """If a request has only encoder chunks in this step, `num_tokens` is 0."""
    draft_sources: list[int] = []


class HeadDraftRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    slot: int
    num_tokens: int
    num_drafts: int
    block_ids: list[int]
    """Blocks of the draft heads' own KV cache, for all tokens and drafts."""


class DrafterCatchUp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens that the draft model must compute before it drafts. The draft model's slot keeps tokens and blocks until
    another request enters it.
    """

    slot: int
    start: int
    num_tokens: int
    token_ids: list[int]
    """Ids of the tokens; empty if `new_request` contains them."""
    first_block: int
    block_ids: list[int]
    new_request: NewRequestData | None
    wants_draft: bool


class DraftToken(NamedTuple):
    token_id: int
    probability: float


class BlockCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    source: int
    target: int
    num_tokens: int


class SlotCopy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    source: int
    target: int


class BlockLoadRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    request_id: str
    tier: str
    num_tokens: int
    began_at: float
    ended_at: float
    """Both times are in seconds of time.monotonic()."""


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Never sent to the API process."""

    scheduled_requests: list[ScheduledRequest]
    new_requests: list[NewRequestData] = []
    block_copies: list[BlockCopy] = []
    """Done in order before the step computes anything."""
    preempted_ids: list[str] = []
    loaded_blocks: list[BlockLoadRecord] = []
    adapter_loads: list[tuple[str, float]] = []
    """(adapter name, seconds that requests waited for the adapter)."""
    freed_slots: list[int] = []
    slot_copies: list[SlotCopy] = []
    """Done in order before the step computes anything."""

    @property
    def without_encoder_only(self) -> SchedulerOutput:
        rows = [row for row in self.scheduled_requests if row.num_tokens]
        return (
            self
            if len(rows) == len(self.scheduled_requests)
            else msgspec.structs.replace(self, scheduled_requests=rows)
        )

    @property
    def has_prefill(self) -> bool:
        return any(
            not row.should_sample or row.num_tokens > 1 + len(row.draft_token_ids) for row in self.scheduled_requests
        )


class RequestFailure(NamedTuple):
    message: str
    cause: ErrorCause = "engine"


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True):
    token_ids: dict[str, list[int]]
    """For each sampling request, one token and one more per accepted draft."""
    logprobs: dict[str, list[TokenLogprob]] = {}
    """One for each token, if requested."""
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    """For each prompt token of the chunk, the log probability of the token after it."""
    errors: dict[str, RequestFailure] = {}
    """These requests end."""
    vectors: dict[str, bytes] = {}
    """Vectors of pooling requests, float32, little-endian. These requests end."""
    used_cuda_graph: bool = False
