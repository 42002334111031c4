"""Tests that constraints that leave no token end their own request with an error: no token is invented, and no other
request of the batch is harmed (issue 58).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.text.token_sequences.bad_words import check_allowed_tokens_remain
from tests.engine.harness import request, run
from tests.tiny_models import save_tiny_model

STUCK: dict[str, dict[str, Any]] = {
    "allowed and a bad word of one token": {"allowed_token_ids": (9,), "bad_words_ids": ((9,),)},
    "allowed and a bad word of two tokens": {"allowed_token_ids": (9,), "bad_words_ids": ((9, 9),)},
    "allowed and the end before min_tokens": {"allowed_token_ids": (2,), "min_tokens": 3, "ignore_eos": False},
    "allowed and a stop token before min_tokens": {
        "allowed_token_ids": (9,),
        "stop_token_ids": (9,),
        "min_tokens": 2,
    },
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def tokens_and_causes(
    engine: EngineCore, requests: list[EngineCoreRequest]
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """The tokens of all requests and the causes of errors, by id."""
    tokens, causes = {each.id: list[int]() for each in requests}, dict[str, str]()
    for each in requests:
        engine.add_request(each)
    while engine.has_work:
        for output in engine.step():
            tokens[output.id] += output.new_ids
            if output.finish_reason == "error":
                causes[output.id] = output.cause
    engine.scheduler.kv_cache_manager.block_pool.check_invariants()
    return tokens, causes


@pytest.mark.parametrize("speculative", [None, {"method": "ngram", "num_speculative_tokens": 3}])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"logprobs": 2}], ids=["greedy", "drawn", "logprobs"])
def test_request_with_no_allowed_token_fails_alone(sampling: dict[str, Any], speculative: Any, path: Path) -> None:
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=64, speculative_config=speculative))
    good = [request(name, range(start, start + 9), max_tokens=6, **sampling) for name, start in (("a", 20), ("b", 60))]
    expected = {name: answer.ids for name, answer in run(engine, good).items()}
    stuck = [request(name, [5, 9, 9, 7], max_tokens=6, **params, **sampling) for name, params in STUCK.items()]
    tokens, causes = tokens_and_causes(engine, [good[0], *stuck, good[1]])
    assert causes == dict.fromkeys(STUCK, "constraints")
    assert {name: ids for name, ids in tokens.items() if name in expected} == expected
    assert tokens["allowed and a bad word of two tokens"] == [9]
    assert not any(0 in ids for name, ids in tokens.items() if name in STUCK)


def test_logit_bias_of_minus_100_is_not_ban(path: Path) -> None:
    engine = EngineCore(EngineConfig(model=str(path), num_kv_blocks=64))
    answer = run(engine, [request("a", [5], max_tokens=2, allowed_token_ids=(9,), logit_bias={9: -100.0})])["a"]
    assert answer.ids == [9, 9]


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (9, 10), "bad_words_ids": ((9,), (10,))},
        {"allowed_token_ids": (2,), "min_tokens": 1},
        {"allowed_token_ids": (9,), "stop_token_ids": (9,), "min_tokens": 1, "ignore_eos": True},
    ],
)
def test_constraints_leaving_no_token_are_rejected(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_allowed_tokens_remain(SamplingParams(**params), (2,))
    assert raised.value.param == "allowed_token_ids"


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (9, 10), "bad_words_ids": ((9,),)},
        {"allowed_token_ids": (9,), "bad_words_ids": ((9, 9),)},
        {"allowed_token_ids": (2,)},
        {"allowed_token_ids": (2,), "min_tokens": 1, "ignore_eos": True},
        {"bad_words_ids": ((9,),), "min_tokens": 1},
    ],
)
def test_constraints_leaving_some_token_are_accepted(params: dict[str, Any]) -> None:
    check_allowed_tokens_remain(SamplingParams(**params), (2,))


def test_seed_of_minus_1_is_random() -> None:
    params = SamplingParams(seed=-1)
    assert params.seed is None
    assert params.choice_seed(0) != params.choice_seed(0)
