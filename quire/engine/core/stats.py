from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import zip_longest
from typing import Any, Literal

import msgspec

from quire.engine.common.scheduler_output import DRAFT_SOURCES, SchedulerOutput

Phase = Literal["queued", "loading", "preempted", "prefill", "decode"]


class TierStats(msgspec.Struct, frozen=True, array_like=True):
    name: str
    pages: int = 0
    """Number of blocks in the tier; 0 if unknown."""
    bytes: int = 0
    fetched_pages: int = 0
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    stored_pages: int = 0
    stored_bytes: int = 0
    off: bool = False
    """True if the tier hung and is no longer used."""

    def add_earlier(self, earlier: TierStats) -> TierStats:
        """Gauges are not added."""
        sums = {name: getattr(self, name) + getattr(earlier, name) for name in self.__struct_fields__[3:-1]}
        return msgspec.structs.replace(self, **sums)


class _Counters(msgspec.Struct, array_like=True):
    preemptions: int = 0
    prompt_tokens: int = 0
    """Prompt tokens that were computed, without cached tokens."""
    generation_tokens: int = 0
    steps: int = 0
    captured_steps: int = 0
    captured_prompt_steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_drafts: list[int] = []
    """Number of accepted drafts by position in the draft."""
    draft_tokens_by_source: list[int] = []
    """Indexed like DRAFT_SOURCES."""
    accepted_by_source: list[int] = []
    prefix_queries: int = 0
    prefix_hits: int = 0
    kept_sessions: int = 0
    session_returns: int = 0
    """Number of prompts that continued a conversation."""
    session_return_tokens: int = 0
    sessions_given_up: int = 0


class EngineStats(_Counters, frozen=True, array_like=True):  # type: ignore[misc]  # a struct can
    """`saved_blocks`: how many more blocks requests would use without windows."""

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    cached_blocks: int = 0
    saved_blocks: int = 0
    tiers: list[TierStats] = []
    load_seconds: float = 0.0
    pages_lost: int = 0
    prefix_unit: int = 0
    """Cached prefixes have a multiple of this number of tokens; 0 if the cache is off."""
    kept_blocks: int = 0
    cache_tokens: int = 0
    experts_read: int = 0
    """This and the next four fields are set only by the first rank, and only with weights on disk (OffloadCounts)."""
    experts_kept: int = 0
    experts_guessed: int = 0
    experts_guessed_right: int = 0
    disk_bytes: int = 0

    def without_gauges(self) -> EngineStats:
        tiers = [msgspec.structs.replace(tier, pages=0, bytes=0, off=False) for tier in self.tiers]
        return msgspec.structs.replace(self, tiers=tiers, **dict.fromkeys(_ZEROED_GAUGES, 0))

    def add_earlier(self, earlier: EngineStats) -> EngineStats:
        sums = {name: getattr(earlier, name) + getattr(self, name) for name in _COUNTERS}
        vectors = {name: add_counts(getattr(earlier, name), getattr(self, name)) for name in _COUNTER_VECTORS}
        before = {tier.name: tier for tier in earlier.tiers}
        tiers = [tier.add_earlier(before.pop(tier.name, TierStats(tier.name))) for tier in self.tiers] + [
            *before.values()
        ]
        return msgspec.structs.replace(self, tiers=tiers, **vectors, **sums)


def add_counts(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]


def count_sources(sources: Sequence[int]) -> list[int]:
    return [sources.count(index) for index in range(len(DRAFT_SOURCES))]


_ZEROED_GAUGES = ("running", "waiting", "used_blocks", "cached_blocks", "saved_blocks", "kept_blocks", "kept_sessions")
_COUNTERS = (
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "prompt_tokens",
    "generation_tokens",
    "steps",
    "captured_steps",
    "captured_prompt_steps",
    "drafts",
    "draft_tokens",
    "load_seconds",
    "pages_lost",
    "session_returns",
    "session_return_tokens",
    "sessions_given_up",
    "experts_read",
    "experts_kept",
    "experts_guessed",
    "experts_guessed_right",
    "disk_bytes",
)
_COUNTER_VECTORS = ("accepted_drafts", "draft_tokens_by_source", "accepted_by_source")


class LiveCounters(_Counters):
    """Lists are replaced and never changed, because EngineStats shares them."""

    def as_dict(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)

    def count_cuda_graph_step(self, *, has_prefill: bool) -> None:
        self.captured_steps += 1
        self.captured_prompt_steps += has_prefill

    def count_drafts(self, sources: Sequence[int], accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += len(sources)
        self.accepted_drafts = add_counts(self.accepted_drafts, [place < accepted for place in range(len(sources))])
        self.draft_tokens_by_source = add_counts(self.draft_tokens_by_source, count_sources(sources))
        self.accepted_by_source = add_counts(self.accepted_by_source, count_sources(sources[:accepted]))


class RequestView(msgspec.Struct, frozen=True):
    id: str
    phase: Phase
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    limit: int
    blocks: int
    shared_blocks: int
    priority: int
    images: list[tuple[int, int]] = []


class BlockTableView(msgspec.Struct, frozen=True):
    block_size: int
    num_groups: int
    """Number of KV cache groups, which the table interleaves."""
    computed_tokens: int
    num_blocks: int
    block_ids: list[int]
    """The first MAX_LISTED_BLOCKS ids; -1 for a block that was freed because it left the window."""
    ref_counts: list[int]
    cached: list[bool]


class MemoryView(msgspec.Struct, frozen=True):
    """Memory of one engine's device in bytes. `total` is the sum of the other fields."""

    total: int
    weights: int
    kv: int
    activations: int
    """On a GPU, what PyTorch's allocator has besides weights and KV cache. On the host, the process's growth since the
    engine became ready.
    """
    runtime: int
    """On a GPU, memory of CUDA itself and of other programs. On the host, memory of Python and libraries."""
    others: int
    free: int


class EngineView(msgspec.Struct, frozen=True):
    stats: EngineStats
    requests: list[RequestView]
    """Running requests, then waiting ones; at most MAX_LISTED_REQUESTS."""
    block_codes: bytes
    """A little-endian uint16 for each block, zlib-compressed. 0: empty; 1: cached without references; 0x8000 + n:
    shared by n requests; 0x7fff: used by a request that is not listed; otherwise 2 + the index of its request.
    """
    resident_bytes: int
    """0 if unknown."""
    seconds: float
    memory: list[MemoryView] = []
    """One for each engine; empty if unknown."""


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Times are in seconds of time.monotonic(). Python's garbage collector tracks neither records nor their fields.
    Otherwise, with 100,000 records it would block the event loop for milliseconds.
    """

    number: int
    began_at: float
    scheduled_at: float
    computed_at: float
    """When the executor's output arrived."""
    applied_at: float
    num_requests: int
    num_tokens: int
    chunks: tuple[tuple[str, int, int], ...]
    """(request id, first token, tokens) of all requests except plain decodes."""
    preempted_ids: tuple[str, ...]
    tier_loads: tuple[tuple[str, str, int, float, float], ...] = ()
    """(request id, tier, tokens, begin, end) of loads before the step."""
    drafts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(request id, source of each draft token). The request's output has the accepted ones and one more token."""
    adapter_loads: tuple[tuple[str, float], ...] = ()
    """(adapter, seconds that the step waited for it)."""
    num_generated_tokens: int = 0
    used_cuda_graph: bool = False


def make_step_record(
    scheduler_output: SchedulerOutput,
    number: int,
    times: tuple[float, float, float, float],
    *,
    used_cuda_graph: bool = False,
) -> StepRecord:
    """`times`: time.monotonic() when the step began, was scheduled, was computed and was applied."""
    new_slots = {new_request.slot for new_request in scheduler_output.new_requests}
    chunks = tuple(
        (row.request_id, row.start, row.num_tokens)
        for row in scheduler_output.scheduled_requests
        if row.num_tokens - len(row.draft_token_ids) > 1 or not row.should_sample or row.slot in new_slots
    )
    tokens = sum(row.num_tokens for row in scheduler_output.scheduled_requests)
    drafts = tuple(
        (row.request_id, tuple(row.draft_sources)) for row in scheduler_output.scheduled_requests if row.draft_sources
    )
    loads = tuple(
        (each.request_id, each.tier, each.num_tokens, each.began_at, each.ended_at)
        for each in scheduler_output.loaded_blocks
    )
    events = tuple(scheduler_output.preempted_ids), loads, drafts, tuple(scheduler_output.adapter_loads)
    return StepRecord(
        number,
        *times,
        len(scheduler_output.scheduled_requests),
        tokens,
        chunks,
        *events,
        used_cuda_graph=used_cuda_graph,
    )


_SUMMED_GAUGES = ("running", "waiting", "used_blocks", "total_blocks", "cached_blocks", "kept_blocks", "kept_sessions")


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """`stats` must not be empty."""
    summed_stats = reduce(lambda all_before, each: each.add_earlier(all_before), stats)
    tier_sizes = [(tier.name, tier.pages, tier.bytes) for each in stats for tier in each.tiers]
    tiers = [
        msgspec.structs.replace(
            tier,
            pages=sum(pages for name, pages, _ in tier_sizes if name == tier.name),
            bytes=sum(size for name, _, size in tier_sizes if name == tier.name),
        )
        for tier in summed_stats.tiers
    ]
    gauges = {name: sum(getattr(each, name) for each in stats) for name in _SUMMED_GAUGES}
    return msgspec.structs.replace(summed_stats, tiers=tiers, **gauges)
