"""Logs a line every ten seconds while requests run: what the engine computes, and how much is waiting."""

from __future__ import annotations

import asyncio
import logging

from quire.engine.core.stats import EngineStats
from quire.engine.link.client import EngineClient

logger = logging.getLogger("quire.throughput")
SECONDS = 10.0


async def tell_throughput(client: EngineClient, seconds: float = SECONDS) -> None:
    """Runs until it is cancelled. Logs nothing for intervals in which nothing ran."""
    before = client.link.stats
    while True:
        await asyncio.sleep(seconds)
        now = client.link.stats
        if now.steps != before.steps or now.running or now.waiting:
            logger.info("%s", throughput(before, now, seconds))
        before = now


def throughput(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """The difference between two statistics of the engine, as text."""
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    generated = (now.generation_tokens - before.generation_tokens) / seconds
    said = f"{prompt:.0f} prompt and {generated:.0f} generated tokens/s; {now.running} running, {now.waiting} waiting"
    said += f"; KV cache {_share(now.used_blocks, now.total_blocks)}"
    if asked := now.prefix_queries - before.prefix_queries:
        said += f", prefix hits {_share(now.prefix_hits - before.prefix_hits, asked)}"
    if drafted := now.draft_tokens - before.draft_tokens:
        said += f", drafts taken {_share(sum(now.accepted_drafts) - sum(before.accepted_drafts), drafted)}"
    return said


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"
