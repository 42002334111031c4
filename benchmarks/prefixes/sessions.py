"""The first token of a conversation's next turn, after other load has filled the KV cache, beside that without load.

`python -m benchmarks.prefixes.sessions [--tokens 512] [--rounds 5]`: SmolLM2-135M's shape, random weights, a KV cache
of three such conversations. A round computes a conversation and at once its next turn, 32 tokens longer; and another
one and, after six other prompts of its length, that one's next turn: with the conversation kept or not, with host
memory as a tier or without, and with the hint that it is about to go on. The tokens are compared between the ways.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kv_tiers import SHAPE
from quire.engine.config import EngineConfig
from quire.engine.loop import Engine
from quire.engine.types import Request, SamplingParams

MORE = 32
"""Tokens that a turn adds."""


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


class Asker:
    def __init__(self, engine: Engine) -> None:
        self._engine, self._number = engine, 0

    def ask(self, prompt: list[int], answer: int = 4, **fields: object) -> tuple[float, int, list[int]]:
        """Seconds to the first token, cached tokens, and the tokens."""
        self._number += 1
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        self._engine.add(Request(id=f"{self._number}", prompt_ids=prompt, params=params, seed=0, **fields))
        began, first, cached, ids = time.perf_counter(), 0.0, 0, list[int]()
        while self._engine.busy:
            for output in self._engine.step():
                first = first or time.perf_counter() - began
                cached, ids = output.cached_tokens, ids + output.new_ids
        return first, cached, ids


def measure(engine: Engine, way: Way, tokens: int, rounds: int) -> Found:
    asker, found = Asker(engine), Found()
    for number in range(rounds):
        prompts = [some(tokens, 10 * number + place) for place in range(2)]
        for loaded, prompt in enumerate(prompts):
            name = way.session and f"{way.session}{number}/{loaded}"
            _, _, answer = asker.ask(prompt, session=name)
            for other in range(OTHERS * loaded):
                asker.ask(some(tokens, 10_000 + 10 * number + other), answer=1)
            if loaded and way.warmed:
                found.hint.append(asker.ask(prompt + answer, answer=1, keep_seconds=60.0)[0])
            seconds, cached, ids = asker.ask([*prompt, *answer, *some(MORE, number)], session=name)
            (found.later if loaded else found.at_once).append(seconds)
            if loaded:
                found.cached.append(cached)
            found.ids.append(ids)
    return found


def some(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, SHAPE["vocab_size"]), k=count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        print(
            f"{'first token, ms':32}{'at once':>9}{'later':>9}{'ratio':>7}{'cached':>8}{'hint':>7}  tokens", flush=True
        )
        wanted: Found | None = None
        for way in WAYS:
            options = {"kv_offload_memory": 4.0} if way.host else {}
            pages = 3 * args.tokens // 16 + 24
            config = EngineConfig(model=folder, load_format="dummy", skip_tokenizer_init=True, num_kv_blocks=pages)
            engine = Engine(config.model_copy(update=options))
            found = measure(engine, way, args.tokens, args.rounds)
            engine.close()
            wanted = wanted or found
            at_once, later = (statistics.median(each) * 1000 for each in (found.at_once, found.later))
            hint = f"{statistics.median(found.hint) * 1000:.0f}" if found.hint else ""
            same = "equal" if found.ids == wanted.ids else "DIFFERENT"
            shown = f"{at_once:9.1f}{later:9.1f}{later / at_once:7.2f}{statistics.median(found.cached):8.0f}{hint:>7}"
            print(f"{way.name:32}{shown}  {same}", flush=True)


if __name__ == "__main__":
    main()
