"""Servers by turns under the same load: output tokens a second with some streams, and prompts.

    python -m benchmarks.sides.beside http://127.0.0.1:8000=MODEL http://127.0.0.1:9000=MODEL --streams 1 8 32

Every round asks each server once, with prompts of random token ids that no round before had, so pairs are of the same
minute and no prefix is cached. Printed are medians, and how many times as fast as each other server the first one was:
the median of the rounds' ratios, and the least and the most. Servers take token ids in /v1/completions and know
`ignore_eos`. Behind a second `=`, `close`: of a server that must get a connection for every request.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass
from itertools import count

from quire.server.cli.bench.client import StreamClient
from quire.server.cli.bench.serve import closed_loop, make_jobs
from quire.server.cli.bench.stats import summarize

PAUSE = 0.7
"""Seconds between two servers' turns: some wait for work by spinning, a little while."""
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
    return made + [Case(f"prompts of {n}", PROMPTS_OPEN, PROMPTS_OPEN, n, 1) for n in args.prompts]


async def rate(server: str, case: Case, seed: int, vocab: int) -> float:
    """Output tokens a second; where answers have one token, prompt tokens a second. Raises RuntimeError for a request
    that failed."""
    url, model, *close = server.split("=")
    load = {"prompts": None, "vocab": vocab, "ignore_eos": True, "temperature": 0.0, "warmup": 1, "shared_prefix": 0}
    load |= {"num_requests": case.requests, "input_len": case.inputs, "output_len": case.outputs, "seed": seed}
    jobs, warming = make_jobs(argparse.Namespace(**load), model)
    client = StreamClient(url, keep_alive=not close)
    try:
        await closed_loop(client, warming, 1)
        began = time.perf_counter()
        summary = summarize(await closed_loop(client, jobs, case.streams), time.perf_counter() - began)
    finally:
        client.close()
    if summary.failed:
        raise RuntimeError(f"{server}: {summary.errors}")
    return (summary.output_tokens if case.outputs > 1 else summary.prompt_tokens) / summary.seconds


async def run(args: argparse.Namespace) -> None:
    seeds = count(int(time.time()))
    for case in cases(args):
        found: dict[str, list[float]] = {server: [] for server in args.servers}
        for _ in range(args.rounds):
            seed = next(seeds)
            for server in args.servers:
                found[server].append(await rate(server, case, seed, args.vocab))
                await asyncio.sleep(PAUSE)
        columns = [told(found[args.servers[0]], rates) for rates in found.values()]
        print(f"{case.name:16}{' | '.join(columns)}", flush=True)


def told(first: list[float], rates: list[float]) -> str:
    """A server's rates, and how many times as fast the first one was."""
    ratios = [ours / theirs for ours, theirs in zip(first, rates, strict=True)]
    text = f"{statistics.median(rates):9.1f} ({' '.join(f'{rate:.1f}' for rate in rates)})"
    if first is rates:
        return text
    return f"{text}, x {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="URL=MODEL[=close]")
    parser.add_argument("--streams", type=int, nargs="*", default=(1, 8, 32))
    parser.add_argument("--prompts", type=int, nargs="*", default=(1024,), help="tokens of prompts, four at a time")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--waves", type=int, default=1, help="requests for each stream of a turn")
    parser.add_argument("--vocab", type=int, default=4000, help="token ids are below this")
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
