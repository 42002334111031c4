"""Right, wrong and mixed drafts change only the number of steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from quire.engine.common.config import EngineConfig
from quire.engine.common.request_params import Grammar, ThinkingBudget
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.drafter import Draft, Drafter, NullDrafter, RequestsToDraft
from quire.engine.core.request import Request
from quire.engine.engine_core import EngineCore
from tests.engine.harness import Answer, request, run
from tests.tiny_models import VOCAB, save_tiny_model

KINDS: list[dict[str, object]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 1},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.5, "prompt_logprobs": 1},
    {"temperature": 1.0, "bad_words_ids": ((4,), (5, 6)), "min_tokens": 9, "stop_token_ids": tuple(range(3, 60, 3))},
    {"temperature": 1.2, "stop_token_ids": tuple(range(3, 60, 4)), "logprobs": 0},
    {"temperature": 1.0, "logprob_token_ids": (7, 3, 200, 11)},
    {"temperature": 1.0, "thinking": ThinkingBudget(4, end_id=3, begin_id=None), "max_tokens": 8},
]
GRAMMAR: dict[str, object] = {"temperature": 1.0, "grammar": Grammar("regex", "(the|and)( (cat|dog|fox))+")}


def traffic(vocab: int, kinds: list[dict[str, object]]) -> list[EngineCoreRequest]:
    rng = random.Random(7)
    requests = []
    for index in range(2 * len(kinds)):
        prompt = [rng.randrange(3, vocab) for _ in range(rng.choice([1, 5, 40, 70]))]
        requests.append(request(str(index), prompt, seed=index, **{"max_tokens": 20} | kinds[index % len(kinds)]))
    return requests


@dataclass
class Oracle(Drafter):
    """Drafts the next `right` tokens of the answer, then `wrong` wrong tokens."""

    answers: dict[str, Answer]
    right: int
    wrong: int
    asked: set[str] = field(default_factory=set)

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        self.asked |= {seq.engine_request.id for seq, _ in asked}
        return [Draft(self._propose(seq)) for seq, _ in asked]

    def _propose(self, seq: Request) -> list[int]:
        known, right = self.answers[seq.engine_request.id].ids[seq.num_output_tokens :], self.right
        return known[:right] + [(token + 1) % 50 + 3 for token in known[right : right + self.wrong]]


class MakeEngine(Protocol):
    def __call__(self, drafter: Drafter, ahead: int) -> EngineCore: ...


def check_drafts_change_nothing(
    engine: MakeEngine, requests: list[EngineCoreRequest], wanted: dict[str, Answer], ahead: int
) -> None:
    plain = engine(NullDrafter(), ahead)
    assert run(plain, requests) == wanted
    for right, wrong in ((4, 0), (0, 3), (2, 2)):
        drafting = engine(Oracle(wanted, right, wrong), ahead)
        assert run(drafting, requests) == wanted, f"{right} right, {wrong} wrong"
        if right and not ahead:
            assert drafting.engine_stats.steps < plain.engine_stats.steps
        assert drafting.engine_stats.generation_tokens == plain.engine_stats.generation_tokens


@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "backend"), [("float32", "cpu"), ("bfloat16", "cpu"), ("bfloat16", "reference")])
def test_drafts_do_not_change_tokens_or_logprobs(dtype: str, backend: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)
    requests = traffic(VOCAB, KINDS)

    def engine(drafter: Drafter, ahead: int, **options: int) -> EngineCore:
        options = {"num_kv_blocks": 300, "threads": 1, "enable_prefix_caching": False} | options
        config = EngineConfig(model=str(path), dtype=dtype, attention_backend=backend, **options)
        return EngineCore(config, make_drafter=lambda *_: drafter, steps_ahead=ahead)

    expected = run(engine(NullDrafter(), 0), requests)
    check_drafts_change_nothing(engine, requests, expected, 0)
    check_drafts_change_nothing(partial(engine, max_num_batched_tokens=21, max_num_seqs=6), requests, expected, 0)
    check_drafts_change_nothing(partial(engine, max_num_seqs=5), requests, expected, 1)
    small = engine(Oracle(expected, 2, 2), 0, num_kv_blocks=13, max_model_len=200)
    if small.info.block_size == 16:
        assert run(small, requests) == expected
        assert small.engine_stats.preemptions > 0


def test_drafts_do_not_change_tokens_with_grammar_and_prefix_cache() -> None:
    """Runs on the embedded model."""
    requests = traffic(300, [*KINDS[:3], GRAMMAR])
    config = EngineConfig(max_model_len=256, num_kv_blocks=100, threads=1)
    expected = run(EngineCore(config), requests)
    oracle = Oracle(expected, 2, 2)
    engine = EngineCore(config, make_drafter=lambda *_: oracle, steps_ahead=1)
    for _ in range(2):  # the second time the prompts are cached
        actual = run(engine, requests)
        assert {name: each.ids for name, each in actual.items()} == {name: each.ids for name, each in expected.items()}
    assert oracle.asked == {each.id for each in requests}
    assert engine.engine_stats.prefix_hits > 0
