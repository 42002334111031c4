"""The figures and snapshots of several engines, added up as those of one."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import reduce

import msgspec
import numpy as np

from quire.engine.core.snapshot import CACHED, UNLISTED
from quire.engine.core.stats import EngineSnapshot, EngineStats, SequenceSnapshot

_GAUGES = ("running", "waiting", "used_blocks", "total_blocks", "cached_blocks", "kept_blocks", "kept_sessions")


def total(stats: Sequence[EngineStats]) -> EngineStats:
    """Gauges and counters added up; there is at least one."""
    found = reduce(lambda all_before, each: each.after(all_before), stats)
    held = [(tier.name, tier.pages, tier.bytes) for each in stats for tier in each.tiers]
    tiers = [
        msgspec.structs.replace(
            tier,
            pages=sum(pages for name, pages, _ in held if name == tier.name),
            bytes=sum(size for name, _, size in held if name == tier.name),
        )
        for tier in found.tiers
    ]
    gauges = {name: sum(getattr(each, name) for each in stats) for name in _GAUGES}
    return msgspec.structs.replace(found, tiers=tiers, **gauges)


def together(snapshots: Sequence[EngineSnapshot]) -> EngineSnapshot:
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
