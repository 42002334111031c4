"""A request while the scheduler runs it. Only the scheduler changes a Request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import EncoderChunk
from quire.engine.common.types import EngineCoreRequest, FinishReason, MediaSpan, TokenLogprob
from quire.engine.core.block_pool import block_hash, media_extra_keys, root_hash


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """What a step computes of a request."""

    num_tokens: int
    cost: int
    """What it takes of the step's token budget, the work of encoder chunks included."""
    encoder_chunks: Sequence[EncoderChunk] = ()

    def __bool__(self) -> bool:
        return self.num_tokens > 0 or bool(self.encoder_chunks)


class RequestStatus(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    """Blocks of its prefix are being loaded from a tier."""
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """Token ids, how many of them are computed, and the blocks that hold their KV.

    `num_computed_tokens` counts tokens whose KV is in the cache, or will be once the steps in flight have run.
    `num_tokens_in_flight` is the largest number of tokens that these steps may sample; the device knows them before the
    scheduler does. A request is caught up when num_computed_tokens == len(token_ids) + num_tokens_in_flight - 1: the
    next step computes the last token and samples another.

    Draft tokens may be rejected: until the scheduler applies the step that verifies them they count as computed and in
    flight but are not in `token_ids`, so they are neither hashed nor shared.
    """

    def __init__(
        self,
        engine_request: EngineCoreRequest,
        arrival: int,
        limit: int,
        *,
        drafting: bool = False,
        pools_all_tokens: bool = False,
        needs_host_tokens: bool = False,
    ) -> None:
        """`drafting`: the drafter may propose tokens. `needs_host_tokens`: set it whatever the request asks for.
        `pools_all_tokens`: an embedding needs the hidden states of all tokens, so the prefix cache cannot be used."""
        assert engine_request.prompt_ids, "an empty prompt is refused before it comes here"
        self.engine_request = engine_request
        self.arrival = arrival
        self.sort_key = (0.0, arrival)
        """Order among requests of the same priority and tenant; the smallest goes first."""
        self.priority_key = (engine_request.priority, *self.sort_key)
        """Order among running requests; the smallest goes first."""
        self.max_output_tokens = limit
        """Maximum number of output tokens, bounded by the context length; 0 for a pooling request."""
        self.token_ids = engine_request.prompt_ids + engine_request.emitted_ids
        self.num_prompt_tokens = len(engine_request.prompt_ids)
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_tokens_in_flight = 0
        self.slot: int | None = None
        self.block_ids: list[int] = []
        """The block table; BlockTables (engine/core/kv_cache/block_tables.py) describes its layout."""
        self.num_trimmed_tokens = 0
        """Blocks outside the window of the token at this position have been freed."""
        self.num_sent_blocks = 0
        """The first blocks of the table that the device already knows."""
        self.num_cached_hashes = 0
        """How many of its first block hashes are in the prefix cache."""
        self.num_snapshot_tokens = 0
        """Tokens covered by its last state snapshot (engine/core/state_snapshots.py) or by the one it started from."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache when it was first scheduled."""
        self.num_charged_tokens = 0
        """Prompt tokens that were cached or already charged to its tenant: recomputing them after a preemption costs
        it nothing."""
        sampling = engine_request.sampling_params
        wants_prompt_logprobs = sampling is not None and sampling.prompt_logprobs is not None
        self.prompt_logprobs_pending = wants_prompt_logprobs and not engine_request.emitted_ids
        self._pools_all_tokens = pools_all_tokens and sampling is None
        self.prompt_logprobs: list[TokenLogprob | None] = []
        has_grammar = sampling is not None and sampling.grammar is not None
        self.can_draft = drafting and sampling is not None
        """Whether draft tokens may be scheduled with it."""
        self.needs_host_tokens = needs_host_tokens or self.can_draft or has_grammar
        """Whether the host must know all its tokens before its next step: for a grammar or a drafter."""
        self._encoded_digests: set[bytes] = set()
        """Digests of the images that are encoded."""
        self._current_encoder_chunk: EncoderChunk | None = None
        """The last chunk that was scheduled of an image."""
        self._block_hashes: list[bytes] = []
        self._root_hash = root_hash(
            engine_request.cache_salt, "" if engine_request.adapter is None else engine_request.adapter.digest
        )

    def set_sort_key_or_return_error(self, place: Callable[[EngineCoreRequest], float]) -> str | None:
        """Set the sort key before the request waits. `place`: Scheduler.place, which a user's class may override.
        Returns an error message if it gave something other than a number."""
        try:
            sort_key = place(self.engine_request)
            problem = (
                None
                if isinstance(sort_key, int | float) and sort_key == sort_key
                else f"gave {sort_key!r}, which is no number"
            )
        except Exception as error:  # whatever a user's method raises
            problem = f"raised {type(error).__name__}: {error}"
        if problem is not None:
            return f"scheduler_cls: {place.__qualname__} {problem}"
        self.sort_key = (sort_key, self.arrival)
        self.priority_key = (self.engine_request.priority, *self.sort_key)
        return None

    @property
    def skips_prefix_cache_reads(self) -> bool:
        """Whether every token must be computed even if it is cached."""
        return self.prompt_logprobs_pending or self._pools_all_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to compute until it is caught up; 0 while all tokens that it may generate are in flight, or while the
        host must first see a token in flight."""
        if self.num_tokens_in_flight and (
            self.needs_host_tokens or self.num_output_tokens + self.num_tokens_in_flight >= self.max_output_tokens
        ):
            return 0
        return len(self.token_ids) + self.num_tokens_in_flight - self.num_computed_tokens

    def next_chunk(self, max_tokens: int, budget: int) -> ScheduledChunk:
        """Its next chunk: at most `max_tokens` tokens, and the encoder chunks of the images among them, within `budget`
        tokens of the budget. A large image is encoded over several steps, as a long prompt is prefilled. A span that
        attends to all of itself is never split: if it does not fit, it waits for the next step, and if it comes first
        and is encoded, it may exceed `max_tokens`."""
        if self.num_computed_tokens >= self.num_prompt_tokens or max_tokens <= 0 or not self.engine_request.spans:
            return ScheduledChunk(max_tokens, max_tokens)
        end = self.num_computed_tokens + min(max_tokens, budget)
        encoder_cost = 0
        chunks: list[EncoderChunk] = []
        last: MediaSpan | None = None
        for span in self.engine_request.spans:
            if span.start >= end:
                break
            if span.start + span.count <= self.num_computed_tokens:
                continue
            begin = max(span.start, self.num_computed_tokens)
            if span.digest not in self._encoded_digests and all(span.digest != each.digest for each in chunks):
                work = next(each.encoder_cost for each in self.engine_request.images if each.digest == span.digest)
                progress = self._encoder_progress(span.digest)
                chunk_end = min(work, progress + budget - encoder_cost - (begin - self.num_computed_tokens))
                if chunk_end > progress:
                    chunks.append(EncoderChunk(span.digest, chunk_end, work))
                    encoder_cost += chunk_end - progress
                if chunk_end < work:
                    end = begin
                    break
                end = min(end, self.num_computed_tokens + budget - encoder_cost)
            last = span
        if last is not None and last.is_bidirectional and last.start < end < (span_end := last.start + last.count):
            end = last.start if last.start > self.num_computed_tokens or chunks else span_end
        max_tokens = max(end - self.num_computed_tokens, 0)
        return ScheduledChunk(max_tokens, max_tokens + encoder_cost, chunks)

    def _encoder_progress(self, digest: bytes) -> int:
        """Encoder progress of the image that is being encoded; 0 for any other."""
        return (
            self._current_encoder_chunk.end_progress
            if self._current_encoder_chunk is not None and self._current_encoder_chunk.digest == digest
            else 0
        )

    def mark_encoded(self, chunks: Sequence[EncoderChunk]) -> None:
        """Count these chunks as done."""
        self._encoded_digests.update(each.digest for each in chunks if each.is_last)
        self._current_encoder_chunk = chunks[-1] if chunks else self._current_encoder_chunk

    def block_hashes(self, count: int, size: int) -> Sequence[bytes]:
        """Hashes of the first `count` blocks of `size` tokens, all of which must be known. `size` is the same in all
        calls."""
        assert count * size <= len(self.token_ids), "hashing tokens that are not known yet"
        while len(self._block_hashes) < count:
            begin = len(self._block_hashes) * size
            parent = self._block_hashes[-1] if self._block_hashes else self._root_hash
            contents = media_extra_keys(self.engine_request.spans, begin, begin + size)
            self._block_hashes.append(block_hash(parent, self.token_ids[begin : begin + size], contents))
        return self._block_hashes[:count]

    def finish_reason_after_token(self, token: int, eos: Collection[int]) -> tuple[FinishReason | None, int | None]:
        """The finish reason if the token that was just appended ends the request, and which of stop_token_ids it is."""
        params = self.engine_request.params
        assert isinstance(params, SamplingParams), "a token of a request for a vector"
        if params.grammar is not None and token in eos:
            return "stop", None
        if self.num_output_tokens > params.min_tokens:
            if token in eos and not params.ignore_eos:
                return "stop", None
            if token in params.stop_token_ids:
                return "stop", token
        return ("length", None) if self.num_output_tokens >= self.max_output_tokens else (None, None)

    def reset_to_waiting(self) -> None:
        """Back to waiting with nothing computed. Tokens in flight still arrive."""
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.slot = None
        self.block_ids = []
        self.num_trimmed_tokens = 0
        self.num_sent_blocks = 0
        self.num_cached_hashes = 0
        self._encoded_digests.clear()
        self._current_encoder_chunk = None
