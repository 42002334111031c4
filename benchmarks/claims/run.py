from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.common.engines import SMOL_135M, at_once, dummy, folder_of, request
from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore

MEAN_PROMPT, MEAN_ANSWER = 161, 338
"""Mean tokens of ShareGPT in the paged attention paper."""
_SPREAD = 1.0
"""Standard deviation of the log length."""


class Row(NamedTuple):
    claim: str
    said: str
    """What the paper or post says."""
    measured: str
    beside: str
    """Measured with the mechanism switched off."""


@contextmanager
def engine(**options: Any) -> Iterator[EngineCore]:
    """An engine with SmolLM2-135M's shape and random weights, unless `model` is given."""
    with folder_of(SMOL_135M) as folder:
        made = EngineCore(EngineConfig(**options)) if "model" in options else dummy(folder, **options)
        try:
            at_once(made, [request("warm", [1] * 64, 4)])
            made.reset_prefix_cache()
            yield made
        finally:
            made.shut_down()


def lengths(count: int, most_prompt: int, most_answer: int, seed: int = 1) -> list[tuple[int, int]]:
    """Log-normal lengths, with ShareGPT's means before truncation."""
    chance = random.Random(seed)

    def one(mean: float, most: int) -> int:
        median = mean * 2.718281828 ** (-(_SPREAD**2) / 2)
        return max(4, min(most, round(median * 2.718281828 ** chance.gauss(0.0, _SPREAD))))

    return [(one(MEAN_PROMPT, most_prompt), one(MEAN_ANSWER, most_answer)) for _ in range(count)]
