"""Tokens do not depend on what is kept: conversations in turn, more than the pool holds, with and without names, and
preempted, against an engine that caches nothing."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from quire.engine.config import EngineConfig
from quire.engine.loop import Engine
from quire.engine.types import Request
from tests.engine.harness import request, run
from tests.tiny_models import save_tiny_model

TALKS, TURNS = 6, 4


def rounds(answers: dict[str, list[int]]) -> list[list[Request]]:
    """The requests of each turn; `answers`: by talk, what the turns before it gave."""
    chance = random.Random(7)
    said = {talk: [[chance.randrange(3, 90) for _ in range(40)] for _ in range(TURNS)] for talk in range(TALKS)}
    found = []
    for turn in range(TURNS):
        step = []
        for talk in range(TALKS):
            prompt = [token for past in range(turn + 1) for token in said[talk][past] + answers[f"{talk}"][: 12 * past]]
            made = request(f"{talk}.{turn}", prompt, max_tokens=12, seed=talk, temperature=0.8)
            step.append(msgspec.structs.replace(made, session=f"s{talk}" if talk % 2 else ""))
        found.append(step)
    return found


@pytest.mark.parametrize("options", [{}, {"kv_offload_memory": 0.01}, {"max_num_batched_tokens": 64}], ids=str)
def test_tokens_are_those_of_an_engine_that_caches_nothing(tmp_path: Path, options: dict[str, object]) -> None:
    path = str(save_tiny_model(tmp_path, "llama"))
    alone = Engine(EngineConfig(model=path, num_kv_blocks=200, threads=1, enable_prefix_caching=False))
    small = Engine(EngineConfig(model=path, num_kv_blocks=26, max_model_len=400, threads=1).model_copy(update=options))
    answers: dict[str, list[int]] = {f"{talk}": [] for talk in range(TALKS)}
    for turn in range(TURNS):
        asked = rounds(answers)[turn]
        wanted = run(alone, asked)
        found = run(small, asked)
        assert {name: each.ids for name, each in found.items()} == {name: each.ids for name, each in wanted.items()}
        for each in asked:
            answers[each.id.split(".")[0]] += wanted[each.id].ids
    stats = small.stats
    assert stats.preemptions > 0
    assert stats.session_returns > 0
    assert 0 < stats.kept_blocks <= 13
    small.reset_prefix_cache()
    assert small.stats.kept_blocks == 0
    small.close()
