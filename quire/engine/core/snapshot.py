"""The live view of an engine, its sequences and a map of the KV pages; of several engines, as of one."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np

from quire.engine.core.blocks import BlockPool
from quire.engine.core.page_tables import held
from quire.engine.core.scheduler import Scheduler
from quire.engine.core.sequence import Sequence, Status
from quire.engine.core.stats import EngineSnapshot, Phase, SequenceSnapshot, total
from quire.engine.processes.procfs import resident_bytes
from quire.engine.types import Span

MOST_SEQUENCES = 512
"""Further sequences are only counted: nobody reads so many, and a snapshot should stay small."""
MOST_IMAGES = 32
"""Places of images that are told of one sequence."""
_NEAR = 4
"""Tokens between two spans of one image at most: the marks between its tiles."""
EMPTY, CACHED, FIRST_OWNER, UNLISTED, SHARED = 0, 1, 2, 0x7FFF, 0x8000


def take_snapshot(scheduler: Scheduler) -> EngineSnapshot:
    began = time.perf_counter()
    running, waiting = scheduler.sequences()
    listed = [*running, *waiting][:MOST_SEQUENCES]
    references = np.frombuffer(scheduler.pool.references, dtype=np.intc)
    return EngineSnapshot(
        stats=scheduler.stats(),
        sequences=[_sequence_snapshot(seq, references) for seq in listed],
        pages=zlib.compress(page_codes(scheduler.pool, references, listed).astype("<u2").tobytes(), 1),
        resident_bytes=resident_bytes(),
        seconds=time.perf_counter() - began,
    )


def page_codes(pool: BlockPool, references: np.ndarray, owners: list[Sequence]) -> np.ndarray:
    """[pages] uint16, as EngineSnapshot.pages says."""
    codes = np.where(references > 0, UNLISTED, EMPTY).astype(np.uint16)
    cached = np.fromiter(pool.cached, dtype=np.int32, count=len(pool.cached))
    codes[cached[references[cached] == 0]] = CACHED
    for code, seq in enumerate(owners, FIRST_OWNER):
        codes[held(seq.blocks)] = code
    shared = references > 1
    codes[shared] = SHARED + np.minimum(references[shared], 0x7FFF)
    return codes


def _sequence_snapshot(seq: Sequence, references: np.ndarray) -> SequenceSnapshot:
    pages = held(seq.blocks)
    return SequenceSnapshot(
        id=seq.request.id,
        phase=_phase(seq),
        prompt_tokens=seq.num_prompt,
        cached_tokens=seq.cached_tokens or 0,
        computed_tokens=seq.computed,
        output_tokens=seq.num_output,
        limit=seq.limit,
        blocks=len(pages),
        shared_blocks=int(np.count_nonzero(references[pages] > 1)),
        priority=seq.request.priority,
        images=joined(seq.request.spans)[:MOST_IMAGES],
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


def _phase(seq: Sequence) -> Phase:
    if seq.status is Status.LOADING:
        return "loading"
    if seq.status is Status.WAITING:
        return "queued" if seq.cached_tokens is None else "preempted"
    # A sequence that resumes after a preemption computes its own output again, too.
    return "prefill" if seq.computed < len(seq.tokens) - 1 or not seq.num_output else "decode"


def together(snapshots: SequenceOf[EngineSnapshot]) -> EngineSnapshot:
    """One snapshot of several engines, at least one: sequences and pages one engine's after another's."""
    sequences: list[SequenceSnapshot] = []
    pages = []
    for snapshot in snapshots:
        codes = np.frombuffer(zlib.decompress(snapshot.pages), dtype="<u2").astype(np.int64)
        owned = (codes > CACHED) & (codes < UNLISTED)
        pages.append(np.where(owned, np.minimum(codes + len(sequences), UNLISTED), codes))
        sequences += snapshot.sequences
    return EngineSnapshot(
        stats=total([each.stats for each in snapshots]),
        sequences=sequences,
        pages=zlib.compress(np.concatenate(pages).astype("<u2").tobytes(), 1),
        resident_bytes=sum(each.resident_bytes for each in snapshots),
        seconds=max(each.seconds for each in snapshots),
    )
