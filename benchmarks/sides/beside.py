"""Servers in turns under the same load: output tokens per second with several streams, and prompts.

    python -m benchmarks.sides.beside http://127.0.0.1:8000=MODEL http://127.0.0.1:9000=MODEL --streams 1 8 32

Each round asks each server once, with new random token ids, so pairs are of the same minute and nothing is cached.
Shows medians, and the first server's speedup over the others: median, least, most. Servers must accept token ids in
/v1/completions and `ignore_eos`. Append `=close` for one connection per request.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass

from benchmarks.common.options import options
from benchmarks.common.servers import by_turns, compared
from quire.server.cli.bench.latency_stats import summarize
from quire.server.cli.bench.serve import build_measured_and_warmup_jobs, run_closed_loop
from quire.server.cli.bench.stream_client import StreamClient

PAUSE = 0.7
"""Seconds between servers' turns, because some spin for a while when idle."""
PROMPTS_OPEN = 4


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    streams: int
    requests: int
    inputs: int
    outputs: int


def cases(args: argparse.Namespace) -> list[Case]:
    made = [
        Case(f"{n} streams" if n > 1 else "1 stream", n, max(2, args.waves * n), args.input_len, args.output_len)
        for n in args.streams
    ]
    made += [Case(f"prompts of {n}", PROMPTS_OPEN, PROMPTS_OPEN, n, 1) for n in args.prompts]
    return made + [Case(f"a prompt of {n}", 1, 1, n, 1) for n in args.alone]


async def rate(server: str, case: Case, seed: int, vocab: int) -> float:
    """Output tokens per second, or prompt tokens if answers have one. Raises RuntimeError if a request fails."""
    url, model, *close = server.split("=")
    load = {"prompts": None, "vocab": vocab, "ignore_eos": True, "temperature": 0.0, "warmup": 1, "shared_prefix": 0}
    load |= {"num_requests": case.requests, "input_len": case.inputs, "output_len": case.outputs, "seed": seed}
    jobs, warming = build_measured_and_warmup_jobs(argparse.Namespace(**load, chats=False, body={}), model)
    client = StreamClient(url, keep_alive=not close)
    try:
        await run_closed_loop(client, warming, 1)
        began = time.perf_counter()
        summary = summarize(await run_closed_loop(client, jobs, case.streams), time.perf_counter() - began)
    finally:
        client.close()
    if summary.failed:
        raise RuntimeError(f"{server}: {summary.errors}")
    return (summary.output_tokens if case.outputs > 1 else summary.prompt_tokens) / summary.seconds


async def run(args: argparse.Namespace) -> None:
    for number, case in enumerate(cases(args)):

        async def measure(server: str, seed: int, case: Case = case, part: int = number) -> float:
            found = await rate(server, case, 1000 * seed + part, args.vocab)
            await asyncio.sleep(PAUSE)
            return found

        rates = await by_turns(args.servers, args.rounds, measure)
        columns = [compared(rates[args.servers[0]], each) for each in rates.values()]
        print(f"{case.name:18}{' | '.join(columns)}", flush=True)


def main() -> None:
    args = options(
        __doc__,
        {
            "servers": {"nargs": "+", "metavar": "URL=MODEL[=close]"},
            "--streams": {"nargs": "*", "default": (1, 8, 32)},
            "--prompts": {"nargs": "*", "default": (1024,), "help": "tokens of prompts, four at a time"},
            "--alone": {"nargs": "*", "default": (), "type": int, "help": "tokens of prompts, one at a time"},
            "--input-len": 128,
            "--output-len": 64,
            "--waves": {"default": 1, "help": "requests for each stream of a turn"},
            "--vocab": {"default": 4000, "help": "token ids are below this"},
            "--rounds": 3,
        },
    )
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
