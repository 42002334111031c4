"""What sampling and beam search have in common: when a call is complete, and what counts once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.engine.types import SamplingParams
from quire.server.generation.fold import fold
from quire.server.generation.generation import Generation
from quire.server.generation.spec import GenerationSpec, Prompt
from quire.server.generation.start import start
from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, scripted

EOS = 258
PROMPTS = [Prompt([97], "a"), Prompt([98, 99], "bc")]
both_ways = pytest.mark.parametrize("beam_search", [False, True])


def generation(api: Api, *, max_tokens: int, **fields: Any) -> Generation:
    """Three choices for each of two prompts."""
    params = SamplingParams(n=3, max_tokens=max_tokens)
    spec = GenerationSpec(id="cmpl-1", model="m", prompts=PROMPTS, params=params, keep=3, **fields)
    runtime = api.app.state.runtime
    return start(spec, api.app.state.model, runtime.client, runtime.metrics)


async def metrics(api: Api) -> dict[str, float]:
    """The sum over all labels of each metric, by its name without a prefix."""
    found: dict[str, float] = {}
    for line in (await api.http.get("/metrics")).text.splitlines():
        if not line.startswith("#"):
            name, value = line.split("{")[0].removeprefix("vllm:"), float(line.split()[-1])
            found[name] = found.get(name, 0.0) + value
    return found


@both_ways
async def test_what_counts_once_for_a_prompt_and_what_for_each_choice(beam_search: bool) -> None:
    async with open_api(FakeEngine(scripted(b"xyz", EOS), eos=[EOS])) as api:
        running = generation(api, max_tokens=2, beam_search=beam_search)
        answers = await fold(running.deltas())
        counted = await metrics(api)
    assert [answer.index for answer in answers] == list(range(6))
    assert running.complete
    assert (running.usage.prompt_tokens, running.usage.completion_tokens, running.usage.cached_tokens) == (3, 12, 1)
    assert (counted["request_params_n_count"], counted["request_params_n_sum"]) == (2, 6)
    assert (counted["request_max_num_generation_tokens_count"], counted["request_success_total"]) == (2, 6)
    assert counted["request_max_num_generation_tokens_sum"] == 4


@both_ways
async def test_a_closed_generation_ends_and_is_not_complete(beam_search: bool) -> None:
    engine = FakeEngine(scripted(b"x" * 200, EOS), step_seconds=0.001)
    async with open_api(engine) as api:
        running = generation(api, max_tokens=200, beam_search=beam_search)
        folding = asyncio.create_task(fold(running.deltas()))
        await engine.sent.wait()
        for _ in range(2):
            running.close()
        answers = await folding
        counted = await metrics(api)
    assert all(answer.finish_reason is None for answer in answers)
    assert not running.complete
    assert not engine.running
    assert (counted["request_success_total"], counted["request_params_n_count"]) == (6, 2)
