"""The first token of a conversation's next turn, after other load has filled the KV cache.

`python -m benchmarks.prefixes.sessions [--tokens 2048] [--rounds 5]`: SmolLM2-135M's shape, random weights, a KV cache
of three such conversations. Each round computes a conversation and, after other prompts of three times the cache's
size, its next turn, 32 tokens longer: with the conversation kept or not, with host memory as a tier or without, and
with the hint that it is about to go on. The tokens are compared.
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
    load: bool = True


WAYS = (
    Way("no other load", load=False),
    Way("not kept"),
    Way("kept", session="talk"),
    Way("not kept, host memory", host=True),
    Way("not kept, host memory, warmed", host=True, warmed=True),
    Way("not kept, warmed", warmed=True),
)


@dataclass
class Found:
    seconds: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    warming: list[float] = field(default_factory=list)


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
        chance = random.Random(number)
        some = lambda count: [chance.randrange(1, SHAPE["vocab_size"]) for _ in range(count)]  # noqa: E731, B023
        prompt, more = some(tokens), some(MORE)
        name = way.session and f"{way.session}{number}"
        _, _, answer = asker.ask(prompt, session=name)
        if way.load:
            for _ in range(9):
                asker.ask(some(tokens), answer=1)
        if way.warmed:
            found.warming.append(asker.ask(prompt + answer, answer=1, keep_seconds=60.0)[0])
        seconds, cached, ids = asker.ask(prompt + answer + more, session=name)
        found.seconds.append(seconds)
        found.cached.append(cached)
        found.ids.append(ids)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        print(f"{'':32}{'first token, ms':>16}{'of that without load':>22}{'cached':>8}{'hint, ms':>10}  tokens")
        wanted: Found | None = None
        for way in WAYS:
            options = {"kv_offload_memory": 4.0} if way.host else {}
            config = EngineConfig(
                model=folder, load_format="dummy", skip_tokenizer_init=True, num_kv_blocks=3 * args.tokens // 16 + 24
            )
            engine = Engine(config.model_copy(update=options))
            found = measure(engine, way, args.tokens, args.rounds)
            engine.close()
            wanted = wanted or found
            median, least = statistics.median(found.seconds), statistics.median(wanted.seconds)
            hint = f"{statistics.median(found.warming) * 1000:.0f}" if found.warming else ""
            same = "equal" if found.ids == wanted.ids else "DIFFERENT"
            cached = statistics.median(found.cached)
            print(
                f"{way.name:32}{median * 1000:16.1f}{median / least:22.2f}{cached:8.0f}{hint:>10}  {same}", flush=True
            )


if __name__ == "__main__":
    main()
