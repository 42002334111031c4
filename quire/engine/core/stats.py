"""What the engine says of its work: counters, each step, and a snapshot between two of them. All frozen structs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import zip_longest
from typing import Any, Literal

import msgspec

Phase = Literal["queued", "loading", "preempted", "prefill", "decode"]


class TierStats(msgspec.Struct, frozen=True, array_like=True):
    """Of one tier of KV pages below the device's: gauges as they are now, and counters since the engine's start."""

    name: str
    pages: int = 0
    """Pages that it has; 0 where it does not say."""
    bytes: int = 0
    fetched_pages: int = 0
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    fetch_seconds: float = 0.0
    """What fetching took, all pages' added up."""
    stored_pages: int = 0
    stored_bytes: int = 0
    off: bool = False
    """Whether it hung, and is not used any more."""

    def add_earlier(self, earlier: TierStats) -> TierStats:
        """With the counters of the engines before."""
        sums = {name: getattr(self, name) + getattr(earlier, name) for name in self.__struct_fields__[3:-1]}
        return msgspec.structs.replace(self, **sums)


class _Counters(msgspec.Struct, array_like=True):
    """What a scheduler, its prefix cache and its sessions count from their start on."""

    preemptions: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed (cached ones not counted)."""
    generation_tokens: int = 0
    steps: int = 0
    captured_steps: int = 0
    """Steps that a CUDA graph computed."""
    captured_prompt_steps: int = 0
    """Of these, those with prompts."""
    drafts: int = 0
    """Times that a sequence's next tokens were guessed and verified."""
    draft_tokens: int = 0
    accepted_drafts: list[int] = []
    """Accepted draft tokens by their place in the draft, from the first."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    kept_sessions: int = 0
    """Conversations for which pages are kept."""
    session_returns: int = 0
    """Prompts that go on with a conversation."""
    session_return_tokens: int = 0
    """Tokens of them that were cached."""
    sessions_given_up: int = 0
    """Times that room was needed, and a conversation lost kept pages."""


class EngineStats(_Counters, frozen=True, array_like=True):  # type: ignore[misc]  # a struct can
    """Gauges as they are now, and counters since the engine's start. Saved: pages not held, thanks to windows."""

    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    cached_blocks: int = 0
    saved_blocks: int = 0
    tiers: list[TierStats] = []
    """Below the device's cache, the nearest first."""
    load_seconds: float = 0.0
    """How long sequences waited for pages of tiers."""
    pages_lost: int = 0
    """Pages that no tier kept, for they came faster than they could be written."""
    prefix_unit: int = 0
    """Tokens in multiples of which a cached prefix is found; 0 where none is. It does not change."""
    kept_blocks: int = 0
    """Pages that are kept for the next turns of conversations, held or free: engine/core/pinned_sessions.py."""
    cache_tokens: int = 0
    """Tokens for which there are pages. It does not change."""
    experts_read: int = 0
    """Where experts are on a disk, as kernels/streaming/weight_offloader.py counts them, of the first rank."""
    experts_kept: int = 0
    experts_guessed: int = 0
    experts_guessed_right: int = 0
    disk_bytes: int = 0

    def without_gauges(self) -> EngineStats:
        """The counters of an engine that is no more."""
        tiers = [msgspec.structs.replace(tier, pages=0, bytes=0, off=False) for tier in self.tiers]
        return msgspec.structs.replace(self, tiers=tiers, **dict.fromkeys(_ZEROED_GAUGES, 0))

    def add_earlier(self, earlier: EngineStats) -> EngineStats:
        """With the counters increased by those of the engines before."""
        sums = {name: getattr(earlier, name) + getattr(self, name) for name in _COUNTERS}
        places = zip_longest(earlier.accepted_drafts, self.accepted_drafts, fillvalue=0)
        before = {tier.name: tier for tier in earlier.tiers}
        tiers = [tier.add_earlier(before.pop(tier.name, TierStats(tier.name))) for tier in self.tiers] + [
            *before.values()
        ]
        return msgspec.structs.replace(self, accepted_drafts=list(map(sum, places)), tiers=tiers, **sums)


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
"""Fields of EngineStats that only ever grow; accepted_drafts holds more of them."""


class LiveCounters(_Counters):
    """These, while they grow. The list is replaced, not changed: a snapshot keeps it."""

    def as_dict(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)

    def count_cuda_graph_step(self, *, has_prefill: bool) -> None:
        """A step that a CUDA graph computed."""
        self.captured_steps += 1
        self.captured_prompt_steps += has_prefill

    def count_drafts(self, drafts: int, accepted: int) -> None:
        """One row's drafts, and how many of them were accepted."""
        self.drafts += 1
        self.draft_tokens += drafts
        places = [*self.accepted_drafts, *[0] * (drafts - len(self.accepted_drafts))]
        self.accepted_drafts = [count + (place < accepted) for place, count in enumerate(places)]


class RequestView(msgspec.Struct, frozen=True):
    """One request as the scheduler sees it."""

    id: str
    phase: Phase
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the prefix cache held when it was admitted."""
    computed_tokens: int
    """Tokens whose KV is in the cache, or will be after the step under way."""
    output_tokens: int
    limit: int
    """Most tokens it may generate."""
    blocks: int
    shared_blocks: int
    """Those of its pages that others hold too."""
    priority: int
    images: list[tuple[int, int]] = []
    """(first token, tokens) of what stands for images in its prompt, neighbours joined; at most MAX_LISTED_IMAGES of
    engine/core/engine_view.py."""


class BlockTableView(msgspec.Struct, frozen=True):
    """The block table of one request, for the live view."""

    block_size: int
    num_groups: int
    """KV cache groups; the table has a block of each for the first `block_size` tokens, then for the next ones, and so
    on."""
    computed_tokens: int
    """Tokens whose KV is in the blocks, or will be after the step under way."""
    num_blocks: int
    """Entries of the whole table."""
    block_ids: list[int]
    """Its first entries, at most engine/core/engine_view.py's MAX_LISTED_BLOCKS; -1: freed, because it left the
    window."""
    ref_counts: list[int]
    """How many requests use each of these."""
    cached: list[bool]
    """Whether each is in the prefix cache, so that other requests find it."""


class MemoryView(msgspec.Struct, frozen=True):
    """How the memory of one engine's device is divided, in bytes: the fields but the first add up to it."""

    total: int
    weights: int
    kv: int
    """KV blocks, and what layers keep of requests in addition."""
    activations: int
    """What else PyTorch's allocator holds on a GPU; on the host, what the process took beyond all KV blocks since it
    was ready."""
    runtime: int
    """On a GPU, CUDA's own and what other programs hold there; on the host, Python and libraries."""
    others: int
    """Other programs, on the host."""
    free: int


class EngineView(msgspec.Struct, frozen=True):
    """The engine between two steps, for the live view."""

    stats: EngineStats
    requests: list[RequestView]
    """Those that run, then those that wait, each in their order; at most engine/core/engine_view.py's
    MAX_LISTED_REQUESTS."""
    block_codes: bytes
    """zlib-compressed little-endian uint16, one for each page: 0 empty, 1 cached and held by nobody, 0x8000 + n shared
    by n sequences, 0x7fff held by one that is not listed, otherwise 2 + the index in `requests` of its owner."""
    resident_bytes: int
    """Memory of the engine process; 0 where the system does not say."""
    seconds: float
    """Time it took to make this snapshot."""
    memory: list[MemoryView] = []
    """Of each engine; empty if it cannot be measured."""


class StepRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step: what it computed, and when. Times are seconds of time.monotonic(), one clock for all processes.

    Tuples, and nothing that the garbage collector follows: a history has 100,000 of them, and each pass over the new
    ones held up the event loop for milliseconds."""

    number: int
    """The first step of an engine is 1."""
    began_at: float
    scheduled_at: float
    """When the scheduler had decided the batch."""
    computed_at: float
    """When the executor's output had arrived."""
    applied_at: float
    """When the scheduler had applied it."""
    num_requests: int
    num_tokens: int
    chunks: tuple[tuple[str, int, int], ...]
    """(request, first token, tokens) of the rows that are not plain decodes; each plain decode has an output."""
    preempted_ids: tuple[str, ...]
    tier_loads: tuple[tuple[str, str, int, float, float], ...] = ()
    """(request, tier, tokens, began, ended) of what came back from tiers of KV pages before the step."""
    drafts: tuple[tuple[str, int], ...] = ()
    """(request, tokens) of the rows with guessed tokens; an output has one token more than were right."""
    adapter_loads: tuple[tuple[str, float], ...] = ()
    """(adapter, seconds) of the adapters that were put into slots before the batch was decided: reading and packing
    them went on beside earlier steps, and this long the step waited."""
    num_generated_tokens: int = 0
    """Tokens that it gave to requests."""
    used_cuda_graph: bool = False
    """Whether a CUDA graph computed it."""


_SUMMED_GAUGES = ("running", "waiting", "used_blocks", "total_blocks", "cached_blocks", "kept_blocks", "kept_sessions")


def sum_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Gauges and counters added up; there is at least one."""
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
