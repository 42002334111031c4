"""First token of a conversation's next turn, with and without other load that fills the KV cache in between.

`python -m benchmarks.prefixes.sessions [--tokens 512] [--rounds 5]`: SmolLM2-135M's shape, random weights, a KV cache
of three conversations. A round computes a conversation and at once its next turn, 32 tokens longer. Then it computes a
second conversation, six prompts of the same length, and the second one's next turn: with and without pinning, with and
without host memory, and with a hint that it will continue. Tokens are compared across ways.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from benchmarks.common.engines import SMOL_135M, Answered, at_once, dummy, folder_of, random_prompt, request
from benchmarks.common.options import options
from quire.engine.engine_core import EngineCore

MORE = 32
"""Tokens per turn."""


@dataclass(frozen=True)
class Way:
    name: str
    session: str = ""
    host: bool = False
    warmed: bool = False


WAYS = (
    Way("not kept"),
    Way("kept", session="talk"),
    Way("not kept, host memory", host=True),
    Way("not kept, host memory, warmed", host=True, warmed=True),
    Way("not kept, warmed", warmed=True),
)
OTHERS = 6


@dataclass
class Found:
    at_once: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    hint: list[float] = field(default_factory=list)


def measure(engine: EngineCore, way: Way, tokens: int, rounds: int) -> Found:
    found, numbers = Found(), count()

    def ask(prompt: list[int], answer: int = 4, **fields: Any) -> Answered:
        return at_once(engine, [request(name := str(next(numbers)), prompt, answer, **fields)])[name]

    for number in range(rounds):
        prompts = [random_prompt(tokens, 10 * number + place) for place in range(2)]
        for loaded, prompt in enumerate(prompts):
            name = way.session and f"{way.session}{number}/{loaded}"
            answered = ask(prompt, session=name).ids
            for other in range(OTHERS * loaded):
                ask(random_prompt(tokens, 10_000 + 10 * number + other), answer=1)
            if loaded and way.warmed:
                found.hint.append(ask(prompt + answered, answer=1, keep_seconds=60.0).first)
            turn = ask([*prompt, *answered, *random_prompt(MORE, number)], session=name)
            (found.later if loaded else found.at_once).append(turn.first)
            if loaded:
                found.cached.append(turn.cached)
            found.ids.append(turn.ids)
    return found


def main() -> None:
    args = options(__doc__, {"--tokens": 512, "--rounds": 5})
    with folder_of(SMOL_135M) as folder:
        print(
            f"{'first token, ms':32}{'at once':>9}{'later':>9}{'ratio':>7}{'cached':>8}{'hint':>7}  tokens", flush=True
        )
        wanted: Found | None = None
        for way in WAYS:
            tier = {"kv_offload_memory": 4.0} if way.host else {}
            engine = dummy(folder, num_kv_blocks=3 * args.tokens // 16 + 24, **tier)
            found = measure(engine, way, args.tokens, args.rounds)
            engine.shut_down()
            wanted = wanted or found
            at_once, later = (statistics.median(each) * 1000 for each in (found.at_once, found.later))
            hint = f"{statistics.median(found.hint) * 1000:.0f}" if found.hint else ""
            same = "equal" if found.ids == wanted.ids else "DIFFERENT"
            shown = f"{at_once:9.1f}{later:9.1f}{later / at_once:7.2f}{statistics.median(found.cached):8.0f}{hint:>7}"
            print(f"{way.name:32}{shown}  {same}", flush=True)


if __name__ == "__main__":
    main()
