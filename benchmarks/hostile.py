"""What other callers notice of an attack: `python -m benchmarks.hostile [--callers 1 64] [--only NAME]`.

A server of the embedded model streams to one honest client and answers another's short prompts while attackers send
benchmarks/attacks.py. Shows, with each attack and without: the stream's longest gap, median time to first token of
short prompts and of a 9 KB prompt, and the server's peak memory.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from benchmarks.attacks import ATTACKS, encoded, send
from benchmarks.common.options import options
from benchmarks.common.servers import served

SECONDS = 3.0
"""Minimum seconds to watch."""
LONG = "Once upon a time there was a king. " * 100


@dataclass(frozen=True)
class Noticed:
    gap: float
    """The stream's longest gap, in seconds."""
    short: float
    """Median time to first token of short prompts."""
    long: float
    """Worst time to first token of a 3,500-character prompt, which a worker resolves."""
    statuses: frozenset[int]
    seconds: float


async def watch(url: str, during: Awaitable[list[list[int]]]) -> Noticed:
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        done = asyncio.Event()
        streaming = asyncio.create_task(stream(client, done))
        short = asyncio.create_task(first_tokens(client, {"prompt": "Once", "max_tokens": 1}, 0.05, done))
        long = asyncio.create_task(first_tokens(client, {"prompt": LONG, "max_tokens": 1}, 0.25, done))
        await asyncio.sleep(0.5)
        began = time.monotonic()
        answers = await during
        seconds = time.monotonic() - began
        await asyncio.sleep(max(0.3, SECONDS - seconds))
        done.set()
        gap = await streaming
        statuses = frozenset(status for each in answers for status in each)
        return Noticed(gap, statistics.median(await short), max(await long), statuses, seconds)


async def stream(client: httpx.AsyncClient, done: asyncio.Event) -> float:
    longest = 0.0
    while not done.is_set():
        body = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            last = None
            async for _ in response.aiter_raw():
                now = time.monotonic()
                longest = longest if last is None else max(longest, now - last)
                last = now
                if done.is_set():
                    break
    return longest


async def first_tokens(
    client: httpx.AsyncClient, body: dict[str, object], pause: float, done: asyncio.Event
) -> list[float]:
    times = []
    while not done.is_set():
        began = time.monotonic()
        (await client.post("/v1/completions", json=body)).raise_for_status()
        times.append(time.monotonic() - began)
        await asyncio.sleep(pause)
    return times


def attacker(port: int, number: int, callers: int, line: Connection) -> None:
    """A process that sends one attack `callers` times per signal and returns the statuses."""

    async def attack() -> list[list[int]]:
        return await asyncio.gather(*(send(port, ATTACKS[number], body) for _ in range(callers)))

    body = encoded(ATTACKS[number])
    line.send(None)
    line.recv()
    line.send(asyncio.run(attack()))


async def attacked(line: Connection) -> list[list[int]]:
    line.send(None)
    answers: list[list[int]] = await asyncio.to_thread(line.recv)
    return answers


async def nothing() -> list[list[int]]:
    return []


def peak(pid: int) -> float:
    """Peak memory in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main() -> None:
    args = options(
        __doc__,
        {
            "--callers": {"default": [1, 64], "nargs": "+", "help": "callers that attack at the same time"},
            "--only": {"default": "", "help": "attacks whose name contains this"},
        },
    )
    with served("--trust-request-chat-template", "--num-kv-blocks", "4096", "--pooling-type", "last") as server:
        pid = server.process.pid
        asyncio.run(watch(server.url, nothing()))  # warms up
        calm = asyncio.run(watch(server.url, nothing()))
        idle = peak(pid)
        print("| attack | callers | answers | longest gap | x | short TTFT | x | long TTFT | x | peak MiB | s |")
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        print(row("none", 0, calm, calm, 0.0))
        for attack in (each for each in ATTACKS if args.only in each.name):
            for callers in args.callers:
                ours, theirs = multiprocessing.Pipe()
                process = multiprocessing.Process(
                    target=attacker, args=(server.port, ATTACKS.index(attack), callers, theirs)
                )
                process.start()
                ours.recv()
                noticed = asyncio.run(watch(server.url, attacked(ours)))
                process.join()
                print(row(attack.name, callers, noticed, calm, peak(pid) - idle), flush=True)


def row(name: str, callers: int, seen: Noticed, calm: Noticed, memory: float) -> str:
    answers = " ".join(map(str, sorted(seen.statuses))) or "-"
    pairs = ((seen.gap, calm.gap), (seen.short, calm.short), (seen.long, calm.long))
    figures = " | ".join(f"{1000 * value:.0f} ms | {value / alone:.1f}" for value, alone in pairs)
    return f"| {name} | {callers} | {answers} | {figures} | +{memory:.0f} | {seen.seconds:.1f} |"


if __name__ == "__main__":
    main()
