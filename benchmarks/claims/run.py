"""An engine that answers requests as they arrive, and the loads that it is asked for."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.kv_tiers import SHAPE
from quire.engine.config import EngineConfig
from quire.engine.loop import Engine
from quire.engine.types import Request, SamplingParams

MEAN_PROMPT, MEAN_ANSWER = 161, 338
"""Tokens, of the ShareGPT conversations that the paper on paged attention answers."""
_SPREAD = 1.0
"""Standard deviation of the logarithm of a length."""


class Row(NamedTuple):
    """One line of the table."""

    claim: str
    said: str
    """By the paper or post."""
    measured: str
    beside: str
    """The same with the mechanism switched off."""


@dataclass
class Answered:
    """When a request came and when its tokens did, in seconds of time.perf_counter()."""

    arrived: float
    tokens: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def latency(self) -> float:
        return self.tokens[-1] - self.arrived

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]


@contextmanager
def engine(**options: object) -> Iterator[Engine]:
    """Of SmolLM2-135M's shape with random weights, or of the `model` named."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        random_weights = {"model": folder, "load_format": "dummy", "skip_tokenizer_init": True}
        made = Engine(EngineConfig(**(options if "model" in options else random_weights | options)))  # type: ignore[arg-type]
        try:
            answer(made, [(0.0, request("warm", [1] * 64, 4))])
            made.reset_prefix_cache()
            yield made
        finally:
            made.close()


def request(name: str, prompt: Sequence[int], tokens: int, **params: object) -> Request:
    """A request of so many greedy tokens."""
    chosen = SamplingParams(**({"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True} | params))  # type: ignore[arg-type]
    return Request(id=name, prompt_ids=list(prompt), params=chosen, seed=0)


def random_prompt(length: int, seed: object) -> list[int]:
    chance = random.Random(str(seed))
    return [chance.randrange(1, SHAPE["vocab_size"]) for _ in range(length)]  # type: ignore[call-overload]


def lengths(count: int, most_prompt: int, most_answer: int, seed: int = 1) -> list[tuple[int, int]]:
    """Tokens of prompts and answers, log-normal with ShareGPT's means before they are cut."""
    chance = random.Random(seed)

    def one(mean: float, most: int) -> int:
        median = mean * 2.718281828 ** (-(_SPREAD**2) / 2)
        return max(4, min(most, round(median * 2.718281828 ** chance.gauss(0.0, _SPREAD))))

    return [(one(MEAN_PROMPT, most_prompt), one(MEAN_ANSWER, most_answer)) for _ in range(count)]


def answer(made: Engine, arrivals: Sequence[tuple[float, Request]]) -> dict[str, Answered]:
    """Submit each request so many seconds from now, and step until all have ended."""
    began, coming = time.perf_counter(), sorted(arrivals, key=lambda arrival: arrival[0])
    found: dict[str, Answered] = {}
    while coming or made.busy:
        now = time.perf_counter()
        while coming and coming[0][0] <= now - began:
            after, each = coming.pop(0)
            found[each.id] = Answered(began + after)
            made.add(each)
        if not made.busy:
            time.sleep(max(0.0, coming[0][0] - (time.perf_counter() - began)))
            continue
        outputs, now = made.step(), time.perf_counter()
        for output in outputs:
            found[output.id].tokens += [now] * len(output.new_ids)
            found[output.id].ended = output.finish_reason is not None
    return found


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
