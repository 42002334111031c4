from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from quire.engine.common.types import MediaSpan
from quire.engine.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from quire.engine.core.kv_cache.block_tables import without_null_blocks
from quire.engine.core.request import Request, RequestStatus
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.stats import BlockTableView, EngineView, MemoryView, Phase, RequestView, sum_stats
from quire.engine.processes.procfs import resident_bytes

MAX_LISTED_REQUESTS = 512
MAX_LISTED_IMAGES = 32
MAX_LISTED_BLOCKS = 1024
_MAX_TILE_GAP = 4
EMPTY_BLOCK = 0
CACHED_BLOCK = 1
FIRST_OWNER = 2
UNLISTED_OWNER = 0x7FFF
SHARED_BLOCK = 0x8000


def take_engine_view(
    scheduler: Scheduler, measure_memory: Callable[[], MemoryView | None] = lambda: None
) -> EngineView:
    began = time.perf_counter()
    memory = measure_memory()
    running, waiting = scheduler.list_requests()
    listed = [*running, *waiting][:MAX_LISTED_REQUESTS]
    ref_counts = np.frombuffer(scheduler.kv_cache_manager.block_pool.ref_counts, dtype=np.intc)
    return EngineView(
        stats=scheduler.make_stats(),
        requests=[_request_view(request, ref_counts) for request in listed],
        block_codes=zlib.compress(
            block_owner_codes(scheduler.kv_cache_manager.block_pool, ref_counts, listed).astype("<u2").tobytes(), 1
        ),
        resident_bytes=resident_bytes(),
        seconds=time.perf_counter() - began,
        memory=[] if memory is None else [memory],
    )


def take_block_table_view(scheduler: Scheduler, request_id: str) -> BlockTableView | None:
    """The table is empty while the request waits; None if the request is unknown."""
    request = scheduler.find_request(request_id)
    if request is None:
        return None
    manager = scheduler.kv_cache_manager
    pool, listed = manager.block_pool, request.block_ids[:MAX_LISTED_BLOCKS]
    return BlockTableView(
        block_size=manager.prefix_cache.block_size,
        num_groups=manager.num_groups,
        computed_tokens=request.num_computed_tokens,
        num_blocks=len(request.block_ids),
        block_ids=list(listed),
        ref_counts=[0 if block == NULL_BLOCK else pool.ref_counts[block] for block in listed],
        cached=[block in pool.cached_blocks for block in listed],
    )


def block_owner_codes(pool: BlockPool, ref_counts: np.ndarray, listed: list[Request]) -> np.ndarray:
    """[blocks] uint16; see EngineView.block_codes."""
    codes = np.where(ref_counts > 0, UNLISTED_OWNER, EMPTY_BLOCK).astype(np.uint16)
    cached = np.fromiter(pool.cached_blocks, dtype=np.int32, count=len(pool.cached_blocks))
    codes[cached[ref_counts[cached] == 0]] = CACHED_BLOCK
    for code, request in enumerate(listed, FIRST_OWNER):
        codes[without_null_blocks(request.block_ids)] = code
    shared = ref_counts > 1
    codes[shared] = SHARED_BLOCK + np.minimum(ref_counts[shared], 0x7FFF)
    return codes


def _request_view(request: Request, ref_counts: np.ndarray) -> RequestView:
    blocks = without_null_blocks(request.block_ids)
    return RequestView(
        id=request.engine_request.id,
        phase=_request_phase(request),
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens or 0,
        computed_tokens=request.num_computed_tokens,
        output_tokens=request.num_output_tokens,
        limit=request.max_output_tokens,
        blocks=len(blocks),
        shared_blocks=int(np.count_nonzero(ref_counts[blocks] > 1)),
        priority=request.engine_request.priority,
        images=merge_image_spans(request.engine_request.spans)[:MAX_LISTED_IMAGES],
    )


def merge_image_spans(spans: Iterable[MediaSpan]) -> list[tuple[int, int]]:
    """(first token, number of tokens) of each image."""
    merged: list[tuple[int, int]] = []
    for span in spans:
        start, count = merged[-1] if merged else (0, 0)
        if merged and span.start - start - count <= _MAX_TILE_GAP:
            merged[-1] = start, span.start + span.count - start
        else:
            merged.append((span.start, span.count))
    return merged


def _request_phase(request: Request) -> Phase:
    if request.status is RequestStatus.LOADING:
        return "loading"
    if request.status is RequestStatus.WAITING:
        return "queued" if request.num_cached_tokens is None else "preempted"
    return (
        "prefill"
        if request.num_computed_tokens < len(request.token_ids) - 1 or not request.num_output_tokens
        else "decode"
    )


def merge_views(views: Sequence[EngineView]) -> EngineView:
    """`views` must not be empty."""
    requests: list[RequestView] = []
    block_codes = []
    for view in views:
        codes = np.frombuffer(zlib.decompress(view.block_codes), dtype="<u2").astype(np.int64)
        owned = (codes > CACHED_BLOCK) & (codes < UNLISTED_OWNER)
        block_codes.append(np.where(owned, np.minimum(codes + len(requests), UNLISTED_OWNER), codes))
        requests += view.requests
    return EngineView(
        stats=sum_stats([each.stats for each in views]),
        requests=requests,
        block_codes=zlib.compress(np.concatenate(block_codes).astype("<u2").tobytes(), 1),
        resident_bytes=sum(each.resident_bytes for each in views),
        seconds=max(each.seconds for each in views),
        memory=[memory for each in views for memory in each.memory],
    )
