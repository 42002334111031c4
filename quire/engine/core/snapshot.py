"""The live view of an engine, its sequences and a map of the KV pages; of several engines, as of one."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from quire.engine.core.block_pool import BlockPool
from quire.engine.core.block_tables import without_null_blocks
from quire.engine.core.request import Request, RequestStatus
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.stats import EngineView, Phase, RequestView, total
from quire.engine.processes.procfs import resident_bytes
from quire.engine.types import Span

MOST_SEQUENCES = 512
"""Further sequences are only counted: nobody reads so many, and a snapshot should stay small."""
MOST_IMAGES = 32
"""Places of images that are told of one sequence."""
_NEAR = 4
"""Tokens between two spans of one image at most: the marks between its tiles."""
EMPTY, CACHED, FIRST_OWNER, UNLISTED, SHARED = 0, 1, 2, 0x7FFF, 0x8000


def take_snapshot(scheduler: Scheduler) -> EngineView:
    began = time.perf_counter()
    running, waiting = scheduler.requests()
    listed = [*running, *waiting][:MOST_SEQUENCES]
    references = np.frombuffer(scheduler.pool.ref_counts, dtype=np.intc)
    return EngineView(
        stats=scheduler.stats(),
        sequences=[_sequence_snapshot(request, references) for request in listed],
        pages=zlib.compress(page_codes(scheduler.pool, references, listed).astype("<u2").tobytes(), 1),
        resident_bytes=resident_bytes(),
        seconds=time.perf_counter() - began,
    )


def page_codes(pool: BlockPool, references: np.ndarray, owners: list[Request]) -> np.ndarray:
    """[pages] uint16, as EngineView.pages says."""
    codes = np.where(references > 0, UNLISTED, EMPTY).astype(np.uint16)
    cached = np.fromiter(pool.cached_blocks, dtype=np.int32, count=len(pool.cached_blocks))
    codes[cached[references[cached] == 0]] = CACHED
    for code, request in enumerate(owners, FIRST_OWNER):
        codes[without_null_blocks(request.block_ids)] = code
    shared = references > 1
    codes[shared] = SHARED + np.minimum(references[shared], 0x7FFF)
    return codes


def _sequence_snapshot(request: Request, references: np.ndarray) -> RequestView:
    pages = without_null_blocks(request.block_ids)
    return RequestView(
        id=request.engine_request.id,
        phase=_phase(request),
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens or 0,
        computed_tokens=request.num_computed_tokens,
        output_tokens=request.num_output_tokens,
        limit=request.limit,
        blocks=len(pages),
        shared_blocks=int(np.count_nonzero(references[pages] > 1)),
        priority=request.engine_request.priority,
        images=joined(request.engine_request.spans)[:MOST_IMAGES],
    )


def joined(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """(first token, tokens) of spans, those of one image as one."""
    found: list[tuple[int, int]] = []
    for span in spans:
        start, count = found[-1] if found else (0, 0)
        if found and span.start - start - count <= _NEAR:
            found[-1] = start, span.start + span.count - start
        else:
            found.append((span.start, span.count))
    return found


def _phase(request: Request) -> Phase:
    if request.status is RequestStatus.LOADING:
        return "loading"
    if request.status is RequestStatus.WAITING:
        return "queued" if request.num_cached_tokens is None else "preempted"
    # A sequence that resumes after a preemption computes its own output again, too.
    return (
        "prefill"
        if request.num_computed_tokens < len(request.token_ids) - 1 or not request.num_output_tokens
        else "decode"
    )


def together(snapshots: Sequence[EngineView]) -> EngineView:
    """One snapshot of several engines, at least one: sequences and pages one engine's after another's."""
    sequences: list[RequestView] = []
    pages = []
    for snapshot in snapshots:
        codes = np.frombuffer(zlib.decompress(snapshot.pages), dtype="<u2").astype(np.int64)
        owned = (codes > CACHED) & (codes < UNLISTED)
        pages.append(np.where(owned, np.minimum(codes + len(sequences), UNLISTED), codes))
        sequences += snapshot.sequences
    return EngineView(
        stats=total([each.stats for each in snapshots]),
        sequences=sequences,
        pages=zlib.compress(np.concatenate(pages).astype("<u2").tobytes(), 1),
        resident_bytes=sum(each.resident_bytes for each in snapshots),
        seconds=max(each.seconds for each in snapshots),
    )
