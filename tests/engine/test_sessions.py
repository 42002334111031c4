"""Pinned sessions change no token: interleaved conversations larger than the pool, with and without session names, and
preempted, against an engine without caching.
"""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from quire.engine.checkpoint.kv_cache_plan import GIB
from quire.engine.common.config import EngineConfig
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from tests.engine.harness import request, run
from tests.engine.tiers.fakes import always
from tests.engine.tiers.test_engine import disk
from tests.tiers import slow
from tests.tiny_models import VOCAB, save_tiny_model

TALKS, TURNS = 6, 4
SLOT = 2 * 4 * (3 * (2 * 4 * 12 + 4 * 32) + 4 * 12 * 32)
"""Bytes of the tiny Qwen3.5's states per sequence."""


def rounds(answers: dict[str, list[int]]) -> list[list[EngineCoreRequest]]:
    """The requests of each turn. `answers`: the tokens of earlier turns, by conversation."""
    chance = random.Random(7)
    user_tokens = {talk: [[chance.randrange(3, 90) for _ in range(40)] for _ in range(TURNS)] for talk in range(TALKS)}
    rounds_of_requests = []
    for turn in range(TURNS):
        step = []
        for talk in range(TALKS):
            prompt = [
                token for past in range(turn + 1) for token in user_tokens[talk][past] + answers[f"{talk}"][: 12 * past]
            ]
            made = request(f"{talk}.{turn}", prompt, max_tokens=12, seed=talk, temperature=0.8)
            step.append(msgspec.structs.replace(made, session=f"s{talk}" if talk % 2 else ""))
        rounds_of_requests.append(step)
    return rounds_of_requests


OPTIONS: list[tuple[str, dict[str, object]]] = [
    ("llama", {}),
    ("llama", {"kv_offload_memory": 0.01}),
    ("llama", {"max_num_batched_tokens": 64}),
    ("qwen3_5", {"state_memory": 2.5e-4, "snapshot_tokens": 16}),
    ("mamba2", {"state_memory": 1e-3, "snapshot_tokens": 16, "kv_offload_memory": 0.02}),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "options"), OPTIONS, ids=str)
def test_tokens_with_pinned_sessions_equal_uncached_engine(
    tmp_path: Path, family: str, options: dict[str, object]
) -> None:
    path = str(save_tiny_model(tmp_path, family))
    alone = EngineCore(EngineConfig(model=path, num_kv_blocks=200, threads=1, enable_prefix_caching=False))
    small = EngineCore(
        EngineConfig(model=path, num_kv_blocks=26, max_model_len=400, threads=1).model_copy(update=options)
    )
    answers: dict[str, list[int]] = {f"{talk}": [] for talk in range(TALKS)}
    pinned_blocks = []
    for turn in range(TURNS):
        requests = rounds(answers)[turn]
        expected = run(alone, requests)
        actual = run(small, requests)
        assert {name: each.ids for name, each in actual.items()} == {name: each.ids for name, each in expected.items()}
        for each in requests:
            answers[each.id.split(".")[0]] += expected[each.id].ids
        pinned_blocks.append(small.engine_stats.kept_blocks)  # 0 if a talk without a session took the blocks
    stats = small.engine_stats
    assert stats.preemptions > 0
    assert stats.session_returns > 0
    assert 0 < max(pinned_blocks) <= 13
    small.reset_prefix_cache()
    assert small.engine_stats.kept_blocks == 0
    small.shut_down()


@pytest.mark.parametrize("kept", [True, False])
def test_state_snapshots_are_pinned_with_kv_blocks(tmp_path: Path, kept: bool) -> None:
    """Other prompts fill both pools in the meantime."""
    path, chance = str(save_tiny_model(tmp_path, "qwen3_5")), random.Random(5)
    options = {"model": path, "dtype": "float32", "threads": 1, "max_model_len": 400, "max_num_seqs": 2}
    options |= {"snapshot_tokens": 64, "speculative_config": {"method": "none"}}
    made = EngineCore(EngineConfig(**options, num_kv_blocks=60, state_memory=14 * SLOT / GIB))
    alone = EngineCore(EngineConfig(**options, num_kv_blocks=60, enable_prefix_caching=False))

    def turn(name: str, prompt: list[int], session: str = "") -> list[int]:
        asked = msgspec.structs.replace(request(name, prompt, max_tokens=10, logprobs=0), session=session)
        actual, expected = (run(each, [asked])[name] for each in (made, alone))
        assert (actual.ids, actual.logprobs) == (expected.ids, expected.logprobs)
        return actual.ids

    def new(count: int) -> list[int]:
        return [chance.randrange(3, VOCAB) for _ in range(count)]

    history = new(170)
    history += turn("0", history, "talk" if kept else "")
    for other in range(12):
        turn(f"other {other}", new(160))
    before = made.engine_stats
    turn("1", history + new(20), "talk" if kept else "")
    computed = made.engine_stats.prompt_tokens - before.prompt_tokens
    assert computed == (200 - 128 if kept else 200)
    assert (before.kept_blocks > 0) == kept
    made.reset_prefix_cache()
    assert made.engine_stats.kept_blocks == 0


@pytest.mark.parametrize("family", ["mamba2", *slow("qwen3_5", "falcon_h1", "jamba", "lfm2", "zamba2")])
def test_pinned_session_with_states_loads_from_tiers(family: str, tmp_path: Path) -> None:
    """From host memory after more was pinned than fits; then from disk, in another process."""
    chance = random.Random(6)
    options = {"model": str(save_tiny_model(tmp_path / "model", family)), "dtype": "float32", "threads": 1}
    options |= {"max_model_len": 400, "max_num_seqs": 2, "snapshot_tokens": 64, "num_kv_blocks": 30}
    options |= {"state_memory": 4e-4, "speculative_config": {"method": "none"}}
    alone = EngineCore(EngineConfig(**options, enable_prefix_caching=False))

    def new(count: int) -> list[int]:
        return [chance.randrange(3, VOCAB) for _ in range(count)]

    def turn(made: EngineCore, prompt: list[int], session: str) -> list[int]:
        """The whole text. Asserts the tokens of an engine that computes it alone."""
        asked = msgspec.structs.replace(request(session, prompt, max_tokens=10, logprobs=0), session=session)
        actual, expected = (run(each, [asked])[session] for each in (made, alone))
        assert (actual.ids, actual.logprobs) == (expected.ids, expected.logprobs)
        return prompt + actual.ids

    made = EngineCore(EngineConfig(**options, kv_offload_memory=0.02, **disk(tmp_path)), make_tiers=always)
    first = turn(made, new(170), "first")
    for other in range(5):
        turn(made, new(170), f"other {other}")
    before = made.engine_stats
    second = turn(made, first + new(20), "first")
    assert made.engine_stats.prompt_tokens - before.prompt_tokens <= 20 + 10 + 64, "what is behind the last snapshot"
    assert made.engine_stats.tiers[0].fetched_pages > before.tiers[0].fetched_pages
    made.shut_down()
    again = EngineCore(EngineConfig(**options, **disk(tmp_path)), make_tiers=always)
    turn(again, second + new(20), "first")
    assert again.engine_stats.prompt_tokens <= 20 + 10 + 64
    assert again.engine_stats.tiers[0].fetched_pages > 0
    again.shut_down()
