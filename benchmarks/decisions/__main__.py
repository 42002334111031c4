"""Questions a second of /v1/systemone, of one server or of several by turns: many questions, about texts that nobody
asked about before.

    python -m benchmarks.decisions http://127.0.0.1:8000=MODEL=PID http://127.0.0.1:9000=MODEL=PID --questions 16

With a server's process id also its seconds of processor time for each question, its children's included: they tell more
than the clock on a machine that others use.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from typing import Any

import httpx

from benchmarks.speculation import processor_seconds

WORDS = (
    "the",
    "fox",
    "king",
    "forest",
    "rain",
    "old",
    "asked",
    "when",
    "and",
    "had",
    "seen",
    "what",
    "it",
    "was",
    "all",
)
TYPES: tuple[dict[str, Any], ...] = (
    {"type": "noul"},
    {"type": "choice", "criteria": {"one": "the first", "two": None, "three": "the last"}},
    {"type": "score", "criteria": ["low", "middle", "high"]},
)


def body(model: str, questions: int, words: int, draw: random.Random) -> dict[str, Any]:
    """A text of its own, with questions of all kinds."""
    asked = {
        f"q{index}": {**TYPES[index % 3], "instructions": f"Question {index}: {' '.join(draw.choices(WORDS, k=8))}?"}
        for index in range(questions)
    }
    return {"model": model, "state": " ".join(draw.choices(WORDS, k=words)), "questions": asked}


async def measured(url: str, model: str, args: argparse.Namespace, seed: int) -> float:
    """Questions a second."""
    draw, waiting = random.Random(seed), asyncio.Semaphore(args.concurrency)
    bodies = [body(model, args.questions, args.words, draw) for _ in range(args.requests)]
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def ask(one: dict[str, Any]) -> None:
            async with waiting:
                response = await client.post("/v1/systemone", json=one)
                response.raise_for_status()
                assert len(response.json()["answers"]) == args.questions

        began = time.perf_counter()
        await asyncio.gather(*(ask(one) for one in bodies))
        return args.requests * args.questions / (time.perf_counter() - began)


async def run(args: argparse.Namespace) -> None:
    rates: dict[str, list[float]] = {server: [] for server in args.servers}
    worked: dict[str, list[float]] = {server: [] for server in args.servers}
    count, seed = args.requests * args.questions, int(time.time())
    for turn in range(-1, args.rounds):
        for server in args.servers:
            url, model, *pid = server.split("=")
            before = processor_seconds(int(pid[0])) if pid else 0.0
            rate = await measured(url, model, args, seed + turn)
            if turn >= 0:  # the first is to warm up
                rates[server].append(rate)
                worked[server].append((processor_seconds(int(pid[0])) - before) / count if pid else 0.0)
    for server in args.servers:
        told = (
            f"{statistics.median(rates[server]):.2f} questions/s ({' '.join(f'{each:.2f}' for each in rates[server])})"
        )
        spent = " ".join(f"{each:.3f}" for each in worked[server])
        pairs = [first / rate for first, rate in zip(rates[args.servers[0]], rates[server], strict=True)]
        told += f", the first server is x {statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
        print(f"{server}: {told}, {statistics.median(worked[server]):.3f} s of processors each ({spent})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="URL=MODEL")
    parser.add_argument("--questions", type=int, default=16, help="of a request")
    parser.add_argument("--words", type=int, default=400, help="of its text")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
