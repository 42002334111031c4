"""Questions per second of /v1/systemone, on one server or on several in turns, about texts new to the server.

    python -m benchmarks.decisions http://127.0.0.1:8000=MODEL=PID http://127.0.0.1:9000=MODEL=PID --questions 16

With a process id also processor seconds per question, including children: on a shared machine these are more reliable
than wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from typing import Any

from benchmarks.common.options import options
from benchmarks.common.servers import by_turns, compared, post_all, processor_seconds

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
    asked = {
        f"q{index}": {**TYPES[index % 3], "instructions": f"Question {index}: {' '.join(draw.choices(WORDS, k=8))}?"}
        for index in range(questions)
    }
    return {"model": model, "state": " ".join(draw.choices(WORDS, k=words)), "questions": asked}


async def run(args: argparse.Namespace) -> None:
    worked: dict[str, list[float]] = {server: [] for server in args.servers}
    count = args.requests * args.questions

    async def measure(server: str, seed: int) -> float:
        """Questions per second."""
        url, model, *pid = server.split("=")
        draw = random.Random(seed)
        bodies = [body(model, args.questions, args.words, draw) for _ in range(args.requests)]
        before = processor_seconds(int(pid[0])) if pid else 0.0
        seconds, answers = await post_all(url, "/v1/systemone", bodies, args.concurrency)
        assert all(len(each["answers"]) == args.questions for each in answers)
        worked[server].append((processor_seconds(int(pid[0])) - before) / count if pid else 0.0)
        return count / seconds

    rates = await by_turns(args.servers, args.rounds, measure, warm=True)
    for server, found in rates.items():
        spent = worked[server][1:]
        told = f"{compared(rates[args.servers[0]], found, 2)} questions/s"
        shown = " ".join(f"{each:.3f}" for each in spent)
        print(f"{server}: {told}, {statistics.median(spent):.3f} s of processors each ({shown})", flush=True)


def main() -> None:
    servers = {"nargs": "+", "metavar": "URL=MODEL"}
    asked = {"--questions": {"default": 16, "help": "of a request"}, "--words": {"default": 400, "help": "of its text"}}
    asyncio.run(
        run(options(__doc__, {"servers": servers, **asked, "--requests": 8, "--concurrency": 1, "--rounds": 3}))
    )


if __name__ == "__main__":
    main()
