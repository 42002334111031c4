"""Tokens and log probabilities equal those without drafts, whichever drafter proposes them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.config import EngineConfig, SpeculativeConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.request_params import SamplingParams, ThinkingBudget
from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.drafter import Draft, Drafter, NullDrafter, RequestsToDraft
from quire.engine.core.request import Request
from quire.engine.engine_builder.drafter_builder import make_configured_drafter
from quire.engine.engine_core import EngineCore
from quire.engine.spec_decode.draft_length import AdaptiveLengthDrafter, StepCosts
from quire.engine.spec_decode.ngram_drafter import NgramDrafter, SuffixDrafter
from quire.engine.text.grammar_compiler import json_grammar
from quire.engine.worker.startup_steps.started_worker import StartedWorker
from tests.engine.harness import Answer, run
from tests.tiny_models import VOCAB, save_tiny_model

CHEAP = StepCosts((1, 64), (1.0, 1.001))
"""With these costs every draft seems to pay."""
PHRASES = ["Once upon a time ", "there was a little dog. ", "The king said: ", "dog dog dog dog ", "a time a time "]


@dataclass
class Garbage(Drafter):
    rng: random.Random

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        return [
            Draft([self.rng.randrange(3, 300) for _ in range(min(most, self.rng.randrange(6)))]) for _, most in asked
        ]


@dataclass
class Right(Drafter):
    """Knows the answers, and drafts beyond their ends."""

    answers: dict[str, Answer]

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        return [
            Draft(([*self.answers[seq.engine_request.id].ids, 40, 41])[seq.num_output_tokens :][:6]) for seq, _ in asked
        ]


@dataclass
class Replaceable(Drafter):
    """Delegates to a drafter that a test replaces between runs of one engine."""

    drafter: Drafter = field(default_factory=NullDrafter)

    @property
    def needs_grammar(self) -> bool:
        return self.drafter.needs_grammar

    def propose(self, asked: RequestsToDraft, tokens: int) -> list[Draft]:
        return self.drafter.propose(asked, tokens)

    def record_acceptance(self, seq: Request, drafts: int, accepted: int) -> None:
        self.drafter.record_acceptance(seq, drafts, accepted)

    def forget_request(self, seq: Request) -> None:
        self.drafter.forget_request(seq)


def always(worker: StartedWorker, config: EngineConfig) -> Drafter | None:
    """Makes the configured drafter, ignoring what its drafts cost."""
    draft = (
        None if worker.started_drafter is None else replace(worker.started_drafter, step_costs=[(1, 1e-6), (64, 1e-6)])
    )
    return make_configured_drafter(replace(worker, step_costs=[(1, 1.0), (64, 1.001)], started_drafter=draft), config)


def traffic(prompts: list[str], params: list[dict[str, object]]) -> list[EngineCoreRequest]:
    encoded = [[byte + 3 for byte in prompt.encode()] for prompt in prompts]
    return [
        EngineCoreRequest(
            id=str(i), prompt_ids=ids, params=SamplingParams(**{"max_tokens": 30} | kind), seed=i, cache_salt=str(i % 2)
        )
        for i, (ids, kind) in enumerate(zip(encoded, params, strict=False))
    ]


def known(found: dict[str, Answer]) -> dict[str, object]:
    """Everything that must be equal; the number of cached prompt tokens may differ."""
    return {name: (a.ids, a.logprobs, a.prompt_logprobs, a.finish_reason) for name, a in found.items()}


@pytest.mark.parametrize("lookup", [NgramDrafter(2), SuffixDrafter(1)], ids=["ngram", "suffix"])
def test_repetition_is_drafted_by_lookup(lookup: Drafter) -> None:
    drafts = Replaceable()
    options = {"max_model_len": 192, "num_kv_blocks": 100, "max_num_batched_tokens": 512}
    engine = EngineCore(EngineConfig(threads=1, **options), make_drafter=lambda *_: drafts)
    requests = traffic([PHRASES[0] * 6, PHRASES[3] * 6], [{"allowed_token_ids": (40,)}, {"allowed_token_ids": (41,)}])
    begun, expected = engine.engine_stats, run(engine, requests)
    plain = engine.engine_stats.steps - begun.steps
    drafts.drafter, begun = AdaptiveLengthDrafter(lookup, 5, CHEAP), engine.engine_stats
    for _ in range(2):
        assert known(run(engine, requests)) == known(expected)
    after = engine.engine_stats
    assert after.steps - begun.steps < 1.5 * plain
    right = sum(after.accepted_drafts) - sum(begun.accepted_drafts)
    assert 10 < right <= after.draft_tokens - begun.draft_tokens
    assert after.drafts > begun.drafts


def test_ngram_config_makes_engine_draft() -> None:
    engine = EngineCore(
        EngineConfig(speculative_config=SpeculativeConfig(method="ngram"), threads=1, num_kv_blocks=100)
    )
    found = run(engine, traffic([PHRASES[0] * 6], [{"temperature": 0.0, "ignore_eos": True, "max_tokens": 60}]))
    assert len(found["0"].ids) == 60
    assert engine.engine_stats.drafts > 0


def test_grammar_forced_tokens_are_drafted_by_default() -> None:
    schema = {
        "type": "object",
        "properties": {"the name of the cat": {"type": "boolean"}},
        "additionalProperties": False,
    }
    held = {"grammar": json_grammar(schema | {"required": list(schema["properties"])}), "max_tokens": 40}
    requests = traffic(PHRASES[:3], [held, held | {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.0}])
    steps, found = {}, {}
    for method in (None, "none"):
        speculative = None if method is None else SpeculativeConfig(method=method)
        engine = EngineCore(EngineConfig(threads=1, num_kv_blocks=100, speculative_config=speculative))
        for each in requests:
            found[method, each.id] = known(run(engine, [each]))
            steps[method, each.id] = engine.engine_stats.steps
        assert (engine.engine_stats.draft_tokens > 20) == (method is None)
    assert [found[None, each.id] for each in requests] == [found["none", each.id] for each in requests]
    assert steps[None, "1"] < 0.7 * steps["none", "1"], "those with a grammar"
    assert steps[None, "2"] - steps[None, "1"] == steps["none", "2"] - steps["none", "1"]


def drafted(path: Path, model: Path, **options: int) -> EngineCore:
    speculative = SpeculativeConfig(method="draft_model", model=str(model), num_speculative_tokens=5)
    config = EngineConfig(model=str(path), speculative_config=speculative, threads=1, dtype="float32", **options)
    return EngineCore(config, make_drafter=always)


KINDS: list[dict[str, object]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.1, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "bad_words_ids": ((4,), (5, 6)), "min_tokens": 9, "stop_token_ids": tuple(range(3, 60, 9))},
    {"temperature": 1.0, "thinking": ThinkingBudget(4, end_id=3, begin_id=None)},
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "shape", [{}, {"max_num_batched_tokens": 21, "max_num_seqs": 4}, {"num_kv_blocks": 13}], ids=str
)
def test_model_drafting_for_itself_has_full_acceptance(shape: dict[str, int], tmp_path: Path) -> None:
    """Also for sampled tokens, because it draws with the same random numbers; with chunked prompts and after
    preemptions.
    """
    path = save_tiny_model(tmp_path, "qwen3", num_hidden_layers=2)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 16, 40, 70]))] for _ in range(10)]
    kinds = [{"max_tokens": 20} | KINDS[i % len(KINDS)] for i in range(10)]
    requests = [
        EngineCoreRequest(id=str(i), prompt_ids=prompt, params=SamplingParams(**kind), seed=i)
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]
    options = {"num_kv_blocks": 200, "max_model_len": 200} | shape
    plain = EngineCore(EngineConfig(model=str(path), threads=1, dtype="float32", **options))
    expected = known(run(plain, requests))
    engine = drafted(path, path, **options)
    for _ in range(2):
        assert known(run(engine, requests)) == expected
    stats = engine.engine_stats
    assert stats.preemptions > 0 or "num_kv_blocks" not in shape
    assert sum(stats.accepted_drafts) == stats.draft_tokens
    assert stats.draft_tokens > 100


def test_draft_model_does_not_change_tokens(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "served", "qwen3", num_hidden_layers=2)
    other = save_tiny_model(tmp_path / "drafts", "llama", num_hidden_layers=1, max_position_embeddings=64)
    requests = [
        EngineCoreRequest(
            id=str(i), prompt_ids=list(range(5 + i, 45 + i)), params=SamplingParams(**{"max_tokens": 40} | kind), seed=i
        )
        for i, kind in enumerate(KINDS)
    ]
    options = {"num_kv_blocks": 100, "max_model_len": 120}
    expected = known(run(EngineCore(EngineConfig(model=str(path), threads=1, dtype="float32", **options)), requests))
    engine = drafted(path, other, **options)
    assert known(run(engine, requests)) == expected
    assert engine.engine_stats.draft_tokens > 0


@pytest.mark.parametrize("lookup", ["ngram", "suffix"])
def test_lookup_after_model_saves_steps_when_text_repeats(lookup: str, tmp_path: Path) -> None:
    """The draft model is mostly wrong. One request repeats a token, and one has little that repeats."""
    path = save_tiny_model(tmp_path / "served", "qwen3", num_hidden_layers=2)
    other = save_tiny_model(tmp_path / "drafts", "llama", num_hidden_layers=1)
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 100, "logprobs": 1, "logit_bias": {40: 100.0}},
        {"max_tokens": 20, "temperature": 0.9, "min_tokens": 20},
    ]
    requests, steps, found = traffic(PHRASES[:2], kinds), dict[str | None, int](), dict[str | None, object]()
    for each in (None, lookup):
        more: dict[str, Any] = {} if each is None else {"lookup": each, "num_lookup_tokens": 9}
        speculative = SpeculativeConfig(method="draft_model", model=str(other), num_speculative_tokens=2, **more)
        config = EngineConfig(
            model=str(path), speculative_config=speculative, threads=1, dtype="float32", num_kv_blocks=50
        )
        engine = EngineCore(config, make_drafter=always)
        found[each] = known(run(engine, requests))
        steps[each] = engine.engine_stats.steps
        stats = engine.engine_stats
        assert sum(stats.draft_tokens_by_source) == stats.draft_tokens
        assert sum(stats.accepted_by_source) == sum(stats.accepted_drafts)
        assert (stats.accepted_by_source[1] > 10) is (each is not None)
    assert found[None] == found[lookup]
    assert steps[lookup] < 0.7 * steps[None]


def test_unusable_draft_model_is_rejected(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "served", "qwen3", num_hidden_layers=1)
    other = save_tiny_model(tmp_path / "drafts", "llama", num_hidden_layers=1, vocab_size=VOCAB + 1)
    with pytest.raises(ConfigError, match=r"speculative_config\.model: its vocabulary has"):
        drafted(path, other, num_kv_blocks=20)
    with pytest.raises(ConfigError, match=r"speculative_config\.model: model: there is no directory"):
        drafted(path, tmp_path / "nowhere", num_kv_blocks=20)
    with pytest.raises(ValueError, match="medusa need a model"):
        SpeculativeConfig(method="draft_model")
