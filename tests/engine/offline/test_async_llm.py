"""Tests `AsyncLLM`: streams of an engine in its own process, which may end at any moment."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
import pytest_asyncio

from quire import LLM, AsyncLLM, EngineArgs, RequestOutput, RequestOutputKind, SamplingParams
from quire.engine.common.errors import EngineError, InvalidRequest

PROMPT = "Once upon a time"


@pytest_asyncio.fixture(scope="module")
async def llm() -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM.from_engine_args(
        EngineArgs(dtype="float32", num_kv_blocks=600, threads=1, pooling_type="last")
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def wanted() -> RequestOutput:
    llm = LLM(dtype="float32", num_kv_blocks=600, threads=1)
    params = SamplingParams(n=2, seed=7, max_tokens=60, logprobs=1, ignore_eos=True)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    llm.close()
    return output


def params(kind: RequestOutputKind, tokens: int = 60) -> SamplingParams:
    return SamplingParams(n=2, seed=7, max_tokens=tokens, logprobs=1, ignore_eos=True, output_kind=kind)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", RequestOutputKind)
async def test_async_stream_of_each_output_kind_equals_llm(
    llm: AsyncLLM, wanted: RequestOutput, kind: RequestOutputKind
) -> None:
    outputs = [output async for output in llm.generate(PROMPT, params(kind), f"r-{kind.name}")]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {f"r-{kind.name}"}
    assert outputs[-1].metrics is not None
    assert outputs[-1].metrics.num_generation_tokens == 60
    if kind is not RequestOutputKind.DELTA:
        assert outputs[-1].outputs == wanted.outputs
        assert (len(outputs) > 5) == (kind is RequestOutputKind.CUMULATIVE)
        for before, after in pairwise(outputs):
            for one, two in zip(before.outputs, after.outputs, strict=True):
                assert two.text.startswith(one.text)
                assert two.token_ids[: len(one.token_ids)] == one.token_ids
        return
    for index in range(2):
        parts = [part for output in outputs for part in output.outputs if part.index == index]
        assert "".join(part.text for part in parts) == wanted.outputs[index].text
        assert [token for part in parts for token in part.token_ids] == wanted.outputs[index].token_ids
        assert [each for part in parts for each in part.logprobs or ()] == wanted.outputs[index].logprobs
        assert parts[-1].cumulative_logprob == wanted.outputs[index].cumulative_logprob


@pytest.mark.slow
async def test_async_stream_survives_engine_kill(llm: AsyncLLM, wanted: RequestOutput) -> None:
    pid, outputs = llm._client.engine_core.pid, []
    async for output in llm.generate(PROMPT, params(RequestOutputKind.CUMULATIVE), "killed"):
        outputs.append(output)
        if len(outputs) == 3:
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
    assert llm._client.engine_core.pid != pid
    assert outputs[-1].outputs == wanted.outputs
    await llm.check_health()


async def test_abort_and_closed_stream_end_request(llm: AsyncLLM) -> None:
    long_params = params(RequestOutputKind.CUMULATIVE, 1500)
    outputs = []
    async for output in llm.generate(PROMPT, long_params, "long"):
        outputs.append(output)
        with pytest.raises(InvalidRequest, match="request_id 'long' is in use"):
            await anext(llm.generate(PROMPT, long_params, "long"))
        await llm.abort("long")
    assert [each.finish_reason for each in outputs[-1].outputs] == ["abort", "abort"]
    assert outputs[-1].finished
    stream = llm.generate(PROMPT, long_params, "left")
    await anext(stream)
    await stream.aclose()
    assert llm._client.num_open == 0
    await llm.abort("nobody")


async def test_async_llm_chats_encodes_and_rejects_invalid_prompts(llm: AsyncLLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    final = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
    (chat_output,) = [output async for output in llm.chat(messages, final)]
    assert "Tell me a story." in (chat_output.prompt or "")
    assert len((await llm.encode(PROMPT)).outputs.data) > 1
    for prompt, sampling_params in ((PROMPT, {"n": 1}), (5, None), ("", None), ([10**6], None)):
        with pytest.raises(InvalidRequest):
            await anext(llm.generate(prompt, sampling_params))  # type: ignore[arg-type]


async def test_reset_prefix_cache_leads_to_no_hits(llm: AsyncLLM) -> None:
    prompt, final = "There was once a fox " * 40, SamplingParams(max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)

    async def cached() -> int:
        (final_output,) = [output async for output in llm.generate(prompt, final)]
        return final_output.num_cached_tokens

    first, second = await cached(), await cached()
    assert (first, second > 100) == (0, True)
    assert await llm.reset_prefix_cache()
    assert await cached() == 0
    assert await cached() == second


@pytest.mark.slow
async def test_closed_async_llm_raises_engine_error() -> None:
    llm = AsyncLLM(num_kv_blocks=64, max_model_len=64, threads=1)
    task = asyncio.ensure_future(anext(llm.generate(PROMPT, SamplingParams(max_tokens=2))))
    assert (await task).outputs[0].token_ids
    await llm.close()
    assert llm._client.engine_core.pid is None
    with pytest.raises(EngineError, match="closed"):
        await anext(llm.generate(PROMPT))
