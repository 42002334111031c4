"""Prefix-miss reports of real engines: in this process, in one that is killed, and in two replicas."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.process_client import ProcessClient
from quire.engine.client.replicated_client import processes
from quire.engine.common.config import EngineConfig
from quire.engine.common.types import PrefixMissReport
from quire.engine.offline.in_process_client import InProcessClient
from tests.engine.harness import request
from tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


async def ask(client: EngineClient, name: str, prompt: list[int], **more: object) -> tuple[int, PrefixMissReport]:
    """The number of cached tokens, and the report about the others."""
    found = None
    async for outputs in client.submit([request(name, prompt, max_tokens=4, **more)]):
        for output in outputs:
            found = output.prefix or found
            cached = output.cached_tokens
    assert found is not None
    assert client.history.find_timeline(name).prefix_report == found
    return cached, found


async def test_prefix_misses_report_evicted_restarted_and_rewritten_tokens(model: Path) -> None:
    client = EngineClient(
        InProcessClient(EngineConfig(model=str(model), num_kv_blocks=24, threads=1, max_model_len=384))
    )
    await client.engine_core.start()
    prompt = [3 + place % 90 for place in range(200)]
    assert (await ask(client, "a", prompt))[1].tokens_by_reason == []
    assert (await ask(client, "b", prompt))[0] == 192
    other = [5 + place * 7 % 80 for place in range(350)]
    assert (await ask(client, "c", other))[1].tokens_by_reason == []
    cached, report = await ask(client, "d", prompt)
    assert report.tokens_by_reason == [("evicted", 192 - cached)]
    assert report.compute_seconds > 0
    client.reset_prefix_cache()
    assert (await ask(client, "e", prompt))[1].tokens_by_reason == [("restarted", 192)]
    cached, report = await ask(client, "f", [*prompt[:100], 1, *prompt[100:]])
    assert (cached, report.tokens_by_reason, report.nearest.num_common) == (96, [("rewritten", 92)], 100)
    await client.engine_core.stop()


@pytest.mark.slow
async def test_restarted_engine_reports_restarted_misses(model: Path) -> None:
    client = EngineClient(ProcessClient(EngineConfig(model=str(model), num_kv_blocks=64, threads=1)))
    await client.engine_core.start()
    prompt = [3 + place % 90 for place in range(200)]
    await ask(client, "a", prompt)
    os.kill(client.engine_core.pid, signal.SIGKILL)
    cached, report = await ask(client, "b", prompt)
    assert (cached, report.tokens_by_reason) == (0, [("restarted", 192)])
    assert (await ask(client, "c", prompt))[1].tokens_by_reason == []
    await client.engine_core.stop()


@pytest.mark.slow
async def test_misses_on_two_replicas_report_computing_or_replica(model: Path) -> None:
    config = EngineConfig(model=str(model), num_kv_blocks=64, threads=1, data_parallel_size=2)
    client = processes(config)
    await client.engine_core.start()
    prompt = [3 + place % 90 for place in range(200)]
    answers = await asyncio.gather(*(ask(client, f"a{number}", prompt) for number in range(12)))
    assert {reason for _, report in answers for reason, _ in report.tokens_by_reason} <= {"computing", "replica"}
    await client.engine_core.stop()
