from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.server import Server


@contextmanager
def served(*args: str) -> Iterator[Server]:
    """Run `quire serve` until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder) / "log", *args)
        try:
            yield server
        finally:
            server.stop()


def processor_seconds(pid: int) -> float:
    """Includes living children."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    own = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(processor_seconds(int(child)) for child in children)


async def post_all(url: str, path: str, bodies: Sequence[Mapping[str, Any]], at_once: int) -> tuple[float, list[Any]]:
    """Returns total seconds, and answers in order."""
    turns = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

        async def ask(body: Mapping[str, Any]) -> Any:
            async with turns:
                return (await client.post(path, json=body)).raise_for_status().json()

        began = time.perf_counter()
        answers = await asyncio.gather(*map(ask, bodies))
        return time.perf_counter() - began, answers


async def by_turns(
    servers: Sequence[str], rounds: int, measure: Callable[[str, int], Awaitable[float]], *, warm: bool = False
) -> dict[str, list[float]]:
    """`measure` gets a server and the round's seed; `warm`: the first round does not count."""
    found: dict[str, list[float]] = {server: [] for server in servers}
    first = int(time.time())
    for turn in range(-1 if warm else 0, rounds):
        for server in servers:
            rate = await measure(server, first + turn)
            if turn >= 0:
                found[server].append(rate)
    return found


def compared(first: Sequence[float], rates: Sequence[float], digits: int = 1) -> str:
    """Rates, and the factor by which the first server is faster."""
    shown = " ".join(f"{rate:.{digits}f}" for rate in rates)
    text = f"{statistics.median(rates):9.{digits}f} ({shown})"
    if first is rates:
        return text
    ratios = [ours / theirs for ours, theirs in zip(first, rates, strict=True)]
    return f"{text}, x {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
