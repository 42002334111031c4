from __future__ import annotations

import asyncio
import logging

from quire.engine.client.engine_client import EngineClient
from quire.engine.core.stats import EngineStats

logger = logging.getLogger("quire.throughput")
LOG_INTERVAL_SECONDS = 10.0


async def log_throughput_periodically(client: EngineClient, seconds: float = LOG_INTERVAL_SECONDS) -> None:
    before = client.engine_core.stats
    while True:
        await asyncio.sleep(seconds)
        now = client.engine_core.stats
        if now.steps != before.steps or now.running or now.waiting:
            logger.info("%s", format_throughput(before, now, seconds))
        before = now


def format_throughput(before: EngineStats, now: EngineStats, seconds: float) -> str:
    prompt = (now.prompt_tokens - before.prompt_tokens) / seconds
    generated = (now.generation_tokens - before.generation_tokens) / seconds
    text = f"{prompt:.0f} prompt and {generated:.0f} generated tokens/s; {now.running} running, {now.waiting} waiting"
    text += f"; KV cache {_percentage(now.used_blocks, now.total_blocks)}"
    if queries := now.prefix_queries - before.prefix_queries:
        text += f", prefix hits {_percentage(now.prefix_hits - before.prefix_hits, queries)}"
    if num_drafted := now.draft_tokens - before.draft_tokens:
        text += f", drafts accepted {_percentage(sum(now.accepted_drafts) - sum(before.accepted_drafts), num_drafted)}"
    return text


def _percentage(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"
