"""Runs an engine step by step in tests, without an event loop or text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest, TokenLogprob
from quire.engine.engine_core import EngineCore


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    cached_tokens: int = 0


def request(name: str, prompt: Sequence[int], *, seed: int = 0, salt: str = "", **params: object) -> EngineCoreRequest:
    params = {"temperature": 0.0, "max_tokens": 32, "ignore_eos": True} | params
    return EngineCoreRequest(
        id=name, prompt_ids=list(prompt), params=SamplingParams(**params), seed=seed, cache_salt=salt
    )


def run(engine: EngineCore, requests: Sequence[EngineCoreRequest]) -> dict[str, Answer]:
    """Submit all requests at once and step until each one has ended."""
    answers = {each.id: Answer() for each in requests}
    for each in requests:
        engine.add_request(each)
    while engine.has_work:
        for output in engine.step():
            answer = answers[output.id]
            assert answer.finish_reason is None, "an output after the terminal one"
            answer.ids += output.new_ids
            answer.logprobs += output.logprobs or []
            answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
            answer.finish_reason = output.finish_reason
            answer.cached_tokens = output.cached_tokens
    engine.scheduler.kv_cache_manager.block_pool.check_invariants()
    assert engine.engine_stats.used_blocks == 0
    return answers
