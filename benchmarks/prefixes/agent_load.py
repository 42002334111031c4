"""An agent's conversation: how much of its prompts the prefix cache had, and why it lacked the rest.

`python -m benchmarks.prefixes.agent_load [--scale 4] [--url http://127.0.0.1:8000=MODEL ...] [--fill TOKENS]`

A recorded agent's shape: 43 turns, prompts of 142,000 tokens in total, 96 % from the turn before. `--scale` divides
lengths. Tokens are random; a turn adds a tool's result and the answer. Then with what breaks prefixes: a leading date,
reordered tools, thoughts dropped by the template, and others that fill the cache between turns. Without --url it starts
`quire serve` with the embedded model. Several servers, which must accept token ids in /v1/completions, take turns and
are compared with the first. Only Quire reports reasons.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import truediv

import httpx

from benchmarks.common.options import options
from benchmarks.common.servers import served

TURNS, FIRST, ADDED, ANSWERED = 43, 1100, 86, 24
"""Number of turns. Tokens of the first prompt, and tokens that a turn adds before its answer and with it."""
IDS = range(300, 1900)
TOOLS = 8
THOUGHT, SAID = 12, 18
"""Tokens of thoughts, which the next prompt lacks, and of text."""
Change = Callable[[int, list[int], list[list[int]], list[int]], list[int]]
"""Makes a prompt of turn, system prompt, tools and rest."""


@dataclass
class Told:
    prompt: int = 0
    cached: int = 0
    possible: int = 0
    """Tokens that earlier prompts had at any position."""
    reasons: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    turn: list[float] = field(default_factory=list)
    """Seconds to the answer's end; `first`: to the first token."""


def as_it_is(turn: int, system: list[int], tools: list[list[int]], rest: list[int]) -> list[int]:
    return system + [token for tool in tools for token in tool] + rest


def another_date(turn: int, system: list[int], tools: list[list[int]], rest: list[int]) -> list[int]:
    return as_it_is(turn, [*system[:20], IDS[turn // 10], *system[21:]], tools, rest)


def other_order(turn: int, system: list[int], tools: list[list[int]], rest: list[int]) -> list[int]:
    return as_it_is(turn, system, random.Random(turn // 15).sample(tools, len(tools)), rest)


CHANGES: dict[str, Change] = {
    "as it is": as_it_is,
    "another date every 10 turns": another_date,
    "tools shuffled every 15 turns": other_order,
    "thoughts dropped": as_it_is,
    "others fill the cache": as_it_is,
}


class Client:
    def __init__(self, url: str, model: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=600)
        self._model = model

    def ask(self, prompt: list[int], told: Told | None, answer: int) -> list[int]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        began, first, usage, ids = time.perf_counter(), None, None, list[int]()
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    first = first or time.perf_counter() - began
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        ids += choice.get("token_ids") or []
        if told is None:
            return ids
        assert usage is not None
        assert first is not None
        details = usage.get("prompt_tokens_details") or {}
        told.prompt += usage["prompt_tokens"]
        told.cached += details.get("cached_tokens") or 0
        told.reasons[details.get("miss_reason", "")] += details.get("missed_tokens", 0)
        told.seconds += details.get("missed_seconds", 0.0)
        told.first.append(first)
        told.turn.append(time.perf_counter() - began)
        return ids


def converse(client: Client, seed: str, kind: str, scale: int, fill: int) -> Told:
    chance, told, change = random.Random(seed), Told(), CHANGES[kind]

    def some(count: int) -> list[int]:
        return chance.choices(IDS, k=max(count // scale, 2))

    system, tools = some(FIRST // 3), [some(FIRST * 2 // 3 // TOOLS) for _ in range(TOOLS)]
    rest: list[int] = []
    for turn in range(TURNS):
        rest += (said := some(ADDED))
        prompt = change(turn, system, tools, rest)
        if kind == "others fill the cache" and turn % 5 == 4:
            for _ in range(4):
                client.ask(chance.choices(IDS, k=fill // 4), None, 1)
        thoughts, said_too = (THOUGHT, SAID) if kind == "thoughts dropped" else (0, max(ANSWERED // scale, 2))
        answer = client.ask(prompt, told, thoughts + said_too)
        told.possible += len(prompt) - len(said) if turn else 0
        rest += answer[thoughts:]
    return told


def main() -> None:
    args = options(
        __doc__,
        {
            "--scale": 4,
            "--url": {"nargs": "+", "metavar": "URL=MODEL", "default": []},
            "--fill": {"default": 6000, "help": "tokens that others have computed every five turns"},
            "--kinds": {"nargs": "+", "choices": list(CHANGES), "default": list(CHANGES)},
            "--rounds": 1,
        },
    )
    if args.url:
        return compare([Client(*server.split("=")) for server in args.url], args)
    with served("--num-kv-blocks", str(args.fill // 16)) as server:
        compare([Client(server.url, "quire-demo")], args)


def compare(clients: list[Client], args: argparse.Namespace) -> None:
    times = f"{'first token, ms':>17}{'turn, ms':>9}"
    print(f"{'':31}{'prompts':>9}{'possible':>10}{'hit':>7}{times}  missed by reason, seconds")
    for kind in args.kinds:
        for turn in range(args.rounds):
            rounds = [converse(client, f"{turn} {kind}", kind, args.scale, args.fill) for client in clients]
            for told in rounds:
                show(kind, told)
            for other in rounds[1:]:
                first = statistics.median(map(truediv, other.first, rounds[0].first))
                whole = sum(other.turn) / sum(rounds[0].turn)
                print(
                    f"{'':31}the first server's are earlier: first tokens x {first:.2f}, turns x {whole:.2f}",
                    flush=True,
                )


def show(kind: str, told: Told) -> None:
    reasons = ", ".join(f"{name} {count:,}" for name, count in told.reasons.most_common() if count) or "none"
    slow = sorted(told.first)[len(told.first) * 9 // 10]
    times = f"{statistics.median(told.first) * 1000:.0f}, p90 {slow * 1000:.0f}"
    times = f"{times:>17}{statistics.median(told.turn) * 1000:9.0f}"
    shares = f"{told.possible / told.prompt:>9.1%} {told.cached / told.prompt:>7.1%}"
    print(f"{kind:31}{told.prompt:9,}{shares}{times}  {reasons}, {told.seconds:.2f}", flush=True)


if __name__ == "__main__":
    main()
