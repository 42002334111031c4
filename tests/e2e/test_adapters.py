"""Many more LoRA adapters than fit at once, requested with Zipf-distributed popularity, while the engine is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from quire.engine.common.config import DEMO_MODEL
from tests.adapters import save_adapter
from tests.e2e.server import Server

pytestmark = pytest.mark.slow

ADAPTERS = 200
REQUESTS = int(os.environ.get("TEST_ADAPTER_REQUESTS", "2000"))
STREAMS = 48
PROMPTS = ("Once upon a time", "The old woman said", "A fox and a crow met")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root, model = tmp_path_factory.mktemp("adapters"), AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    modules = []
    for number in range(ADAPTERS):
        targets = ("q_proj", "v_proj", "down_proj")
        folder = save_adapter(root / f"a{number}", model, 1 + number % 8, targets=targets, seed=number, size=0.7)
        modules.append(f"a{number}={folder}")
    flags = ("--enable-lora", "--max-loras", "16", "--max-cpu-loras", "32", "--threads", "1")
    server = Server(root / "log", *flags, "--lora-modules", *modules)
    yield server
    assert server.stop() == 0


async def answer(client: httpx.AsyncClient, key: tuple[str, str]) -> Any:
    body = {"model": key[0], "prompt": key[1], "max_tokens": 8, "temperature": 1.0, "seed": 3, "logprobs": 1}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


async def test_200_lora_adapters_answer_deterministically_across_engine_kill(server: Server) -> None:
    """Equal requests get equal answers, whichever requests run at the same time."""
    rng = random.Random(4)
    names = [f"a{number}" for number in range(ADAPTERS)]
    zipf = [1 / (rank + 1) for rank in range(ADAPTERS)]
    keys = [(rng.choices(names, zipf)[0], rng.choice(PROMPTS)) for _ in range(REQUESTS - STREAMS)]
    keys += [("quire-demo", rng.choice(PROMPTS)) for _ in range(STREAMS)]
    rng.shuffle(keys)
    pending_keys, answers = iter(keys), {}
    counts: Counter[tuple[str, str]] = Counter()

    async def user(client: httpx.AsyncClient) -> None:
        for key in pending_keys:
            choices = await answer(client, key)
            assert answers.setdefault(key, choices) == choices, key
            counts[key] += 1
            if counts.total() == REQUESTS // 2:
                pid = server.engine_pid()
                assert pid is not None
                os.kill(pid, signal.SIGKILL)

    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        await asyncio.gather(*[user(client) for _ in range(STREAMS)])
        assert counts.total() == REQUESTS
        assert len({key[0] for key in counts}) > min(ADAPTERS // 2, REQUESTS // 10)
        assert server.metric("quire:engine_deaths_total") == 1
        for key in rng.sample(sorted(answers), 20):
            assert await answer(client, key) == answers[key]
    first = {key[0]: value[0]["text"] for key, value in answers.items() if key[1] == PROMPTS[0]}
    assert len(set(first.values())) > len(first) // 2  # the adapters differ, so the texts do


async def test_running_request_keeps_lora_weights_when_adapter_is_reloaded(server: Server, tmp_path: Path) -> None:
    """The adapter's name gets other weights, and the engine dies, while the request runs."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    folder = save_adapter(tmp_path / "mine", model, 8, seed=1000)
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        load_body = {"lora_name": "mine", "lora_path": str(folder), "load_inplace": True}
        assert (await client.post("/v1/load_lora_adapter", json=load_body)).status_code == 200
        body = {"model": "mine", "prompt": PROMPTS[0], "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        before = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        under_way = asyncio.create_task(client.post("/v1/completions", json=body))
        while not server.metric("vllm:num_requests_running"):  # noqa: ASYNC110, there is no event to wait for
            await asyncio.sleep(0.01)
        save_adapter(folder, model, 8, seed=1001)
        assert (await client.post("/v1/load_lora_adapter", json=load_body)).status_code == 200
        pid = server.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert (await under_way).json()["choices"][0]["text"] == before
        assert (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"] != before
