"""What sampling and beam search share: when a generation is complete, and what is counted once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.engine.common.errors import Overloaded
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import TokenLogprob
from quire.server.durability.durable_request import DurableRequest
from quire.server.generation import output_parts as folds
from quire.server.generation.choice_state import AnswerToken, ChoiceDelta
from quire.server.generation.generation import Generation
from quire.server.generation.output_parts import collect_choices
from quire.server.generation.resolved_request import AnswerIdentity, Caller, GenerationRequest, Prompt
from quire.server.pipeline.generate import submit_generation
from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, scripted

EOS = 258
PROMPTS = [Prompt([97], "a"), Prompt([98, 99], "bc")]
both_ways = pytest.mark.parametrize("beam_search", [False, True])


class NoDurability(DurableRequest):
    def __init__(self) -> None:
        pass

    async def identify(self, resolved: GenerationRequest, fresh: AnswerIdentity) -> AnswerIdentity:
        return fresh


def generation(api: Api, *, max_tokens: int, **fields: Any) -> Generation:
    """Three choices for each of two prompts."""
    params = SamplingParams(n=3, max_tokens=max_tokens)
    named = {"identity": AnswerIdentity(id="cmpl-1"), "caller": Caller(), "model": "m"}
    request = GenerationRequest(prompts=PROMPTS, params=params, num_returned=3, **named, **fields)
    return submit_generation(request, api.runtime, NoDurability()).generation


async def metrics(api: Api) -> dict[str, float]:
    """The sum over all labels of each metric, by its name without the prefix."""
    totals: dict[str, float] = {}
    for line in (await api.http.get("/metrics")).text.splitlines():
        if not line.startswith("#"):
            name, value = line.split("{")[0].removeprefix("vllm:"), float(line.split()[-1])
            totals[name] = totals.get(name, 0.0) + value
    return totals


@both_ways
async def test_metrics_count_each_prompt_once_and_each_choice(beam_search: bool) -> None:
    async with open_api(FakeEngine(scripted(b"xyz", EOS), eos=[EOS])) as api:
        running = generation(api, max_tokens=2, beam_search=beam_search)
        answers = await collect_choices(running.deltas(), lambda step: None)
        counted = await metrics(api)
    assert [answer.index for answer in answers] == list(range(6))
    assert running.is_complete
    assert (running.usage.prompt_tokens, running.usage.completion_tokens, running.usage.cached_tokens) == (3, 12, 1)
    assert (counted["request_params_n_count"], counted["request_params_n_sum"]) == (2, 6)
    assert (counted["request_max_num_generation_tokens_count"], counted["request_success_total"]) == (2, 6)
    assert counted["request_max_num_generation_tokens_sum"] == 4


@both_ways
async def test_closed_generation_ends_incomplete(beam_search: bool) -> None:
    engine = FakeEngine(scripted(b"x" * 200, EOS), step_seconds=0.001)
    async with open_api(engine) as api:
        running = generation(api, max_tokens=200, beam_search=beam_search)
        folding = asyncio.create_task(collect_choices(running.deltas(), lambda step: None))
        await engine.sent.wait()
        for _ in range(2):
            running.close()
        answers = await folding
        counted = await metrics(api)
    assert all(answer.finish_reason is None for answer in answers)
    assert not running.is_complete
    assert not engine.running
    assert (counted["request_success_total"], counted["request_params_n_count"]) == (6, 2)


async def test_max_logprobs_limits_only_responses_without_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "MAX_LOGPROBS", 100)
    body = {"prompt": "x", "n": 2, "logprobs": 1, "ignore_eos": True, "max_tokens": 25}
    engine = FakeEngine(scripted(b"x" * 200, EOS))
    async with open_api(engine) as api:
        assert (await api.http.post("/v1/completions", json=body)).status_code == 200, "exactly as many"
        rejection = await api.http.post("/v1/completions", json={**body, "max_tokens": 60})
        assert (rejection.status_code, rejection.json()["error"]["param"]) == (400, "logprobs")
        assert not engine.running
        streamed = await api.http.post("/v1/completions", json={**body, "max_tokens": 60, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert api.runtime.logprob_budget._total_logprobs == 0


def test_logprob_budget_rejects_largest_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "MAX_LOGPROBS_IN_ALL", 10)
    token = AnswerToken(1, TokenLogprob(1, -1.0, 1, [(1, -1.0)]), 0)
    step = [ChoiceDelta(0, "x", [token] * 2)]
    budget = folds.LogprobBudget()
    with budget.track_call() as small:
        with budget.track_call() as large:
            large(step)
            large(step)
            small([ChoiceDelta(0, "x", [token])])
            small([ChoiceDelta(0, "x", [token])])
            with pytest.raises(Overloaded):
                large(step)
        small([ChoiceDelta(0, "x", [token] * 3)])
