from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.scheduler_output import EncoderChunk
from quire.engine.common.types import EngineCoreRequest, FinishReason, MediaSpan, TokenLogprob


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    num_tokens: int
    cost: int
    encoder_chunks: Sequence[EncoderChunk] = ()

    def __bool__(self) -> bool:
        return self.num_tokens > 0 or bool(self.encoder_chunks)


class RequestStatus(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    """The request waits for blocks from a tier."""
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """Only the scheduler and the classes that it calls change it.

    `num_computed_tokens` includes the tokens of steps in flight. These steps sample at most `num_tokens_in_flight`
    tokens. If num_computed_tokens == len(token_ids) + num_tokens_in_flight - 1, the next step computes the last token
    and samples another. Draft tokens that are not yet verified count as computed and as in flight, but they are not in
    `token_ids`, so they are neither hashed nor shared.
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
        """`pools_all_tokens`: pooling needs the hidden states of all tokens, so pooling requests cannot use the prefix
        cache.
        """
        assert engine_request.prompt_ids, "an empty prompt is refused before it comes here"
        self.engine_request = engine_request
        self.arrival = arrival
        self.sort_key = (0.0, arrival)
        self.priority_key = (engine_request.priority, *self.sort_key)
        self.max_output_tokens = limit
        """0 for pooling requests."""
        self.token_ids = engine_request.prompt_ids + engine_request.emitted_ids
        self.num_prompt_tokens = len(engine_request.prompt_ids)
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_tokens_in_flight = 0
        self.slot: int | None = None
        self.block_ids: list[int] = []
        self.num_trimmed_tokens = 0
        """Value of num_computed_tokens when blocks outside the window were last freed."""
        self.num_sent_blocks = 0
        """Number of leading entries of block_ids that were already sent to the device."""
        self.num_cached_hashes = 0
        self.num_snapshot_tokens = 0
        self.num_cached_tokens: int | None = None
        """None until the request first starts."""
        self.num_charged_tokens = 0
        """Recomputing prompt tokens after a preemption costs the tenant nothing."""
        sampling = engine_request.sampling_params
        wants_prompt_logprobs = sampling is not None and sampling.prompt_logprobs is not None
        self.prompt_logprobs_pending = wants_prompt_logprobs and not engine_request.emitted_ids
        self._pools_all_tokens = pools_all_tokens and sampling is None
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.can_draft = drafting and sampling is not None
        self.needs_host_tokens = needs_host_tokens or self.can_draft
        """The host must know each token before the next step is scheduled, for example because a drafter reads it."""
        self._encoded_digests: set[bytes] = set()
        self._current_encoder_chunk: EncoderChunk | None = None
        self._block_hashes: list[bytes] = []
        self._root_hash = root_hash(
            engine_request.cache_salt, "" if engine_request.adapter is None else engine_request.adapter.digest
        )

    def set_sort_key_or_return_error(self, place: Callable[[EngineCoreRequest], float]) -> str | None:
        """`place` may be a user's function, which may raise or return something that is not a number."""
        try:
            sort_key = place(self.engine_request)
            problem = (
                None
                if isinstance(sort_key, int | float) and sort_key == sort_key
                else f"gave {sort_key!r}, which is not a number"
            )
        except Exception as error:
            problem = f"raised {type(error).__name__}: {error}"
        if problem is not None:
            return f"scheduler_cls: {place.__qualname__} {problem}"
        self.sort_key = (sort_key, self.arrival)
        self.priority_key = (self.engine_request.priority, *self.sort_key)
        return None

    @property
    def skips_prefix_cache_reads(self) -> bool:
        return self.prompt_logprobs_pending or self._pools_all_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """0 while tokens in flight may complete the output, or must reach the host first."""
        if self.num_tokens_in_flight and (
            self.needs_host_tokens or self.num_output_tokens + self.num_tokens_in_flight >= self.max_output_tokens
        ):
            return 0
        return len(self.token_ids) + self.num_tokens_in_flight - self.num_computed_tokens

    def next_chunk(self, max_tokens: int, budget: int) -> ScheduledChunk:
        """The tokens and the encoder chunks that they need together cost at most `budget`. A bidirectional span is
        never split: it waits for the next step or, if it comes first and its image is encoded, exceeds both limits.
        """
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
        return (
            self._current_encoder_chunk.end_progress
            if self._current_encoder_chunk is not None and self._current_encoder_chunk.digest == digest
            else 0
        )

    def mark_encoded(self, chunks: Sequence[EncoderChunk]) -> None:
        self._encoded_digests.update(each.digest for each in chunks if each.is_last)
        self._current_encoder_chunk = chunks[-1]

    def block_hashes(self, count: int, size: int) -> Sequence[bytes]:
        """`size` must be the same in all calls."""
        assert count * size <= len(self.token_ids), "hashing tokens that are not known yet"
        while len(self._block_hashes) < count:
            begin = len(self._block_hashes) * size
            parent = self._block_hashes[-1] if self._block_hashes else self._root_hash
            spans = self.engine_request.spans
            contents = media_extra_keys(spans, begin, begin + size) if spans else b""
            self._block_hashes.append(block_hash(parent, self.token_ids[begin : begin + size], contents))
        return self._block_hashes[:count]

    def finish_reason_after_token(self, token: int, eos: Collection[int]) -> tuple[FinishReason | None, int | None]:
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
        """Tokens in flight are still appended."""
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.slot = None
        self.block_ids = []
        self.num_trimmed_tokens = 0
        self.num_sent_blocks = 0
        self.num_cached_hashes = 0
        self._encoded_digests.clear()
        self._current_encoder_chunk = None


def root_hash(salt: str, adapter: str = "") -> bytes:
    """Parent hash of the first block. Prefixes with different salts or adapters never match. `adapter`: hex digest."""
    return blake2b(salt.encode(), digest_size=16, person=bytes.fromhex(adapter)[:16]).digest()


def block_hash(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """A 16-byte hash of these tokens and, by `parent`, of all tokens before them."""
    return blake2b(parent + array("q", token_ids).tobytes() + extra, digest_size=16).digest()


def media_extra_keys(spans: Sequence[MediaSpan], begin: int, end: int) -> bytes:
    """Digest and offset of each span that overlaps tokens [begin, end)."""
    overlapping_spans = [span for span in spans if span.start < end and begin < span.start + span.count]
    offsets = ((span.start - span.offset - begin).to_bytes(8, "little", signed=True) for span in overlapping_spans)
    return b"".join(span.digest + first for span, first in zip(overlapping_spans, offsets, strict=True))
