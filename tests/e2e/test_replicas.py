"""Data-parallel engines: requests find cached prefixes on the right replica, and a killed replica changes no token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from quire import LLM
from quire import SamplingParams as LLMParams
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.replicated_client import ReplicatedClient
from quire.engine.client.weights import Weights
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.offline.in_process_client import InProcessClient
from tests.e2e.server import Server
from tests.e2e.streams import KINDS, answer, ask_until

pytestmark = pytest.mark.slow

STREAMS, PREFIXES, PREFIX, OWN, OUTPUT = 100, 10, 256, 24, 24
KILLS = int(os.environ.get("TEST_KILLS", "6"))
CONFIG = EngineConfig(num_kv_blocks=4096, max_num_seqs=64)
Tokens = dict[str, list[int]]


def streams() -> list[EngineCoreRequest]:
    """Alternately greedy and sampled requests; the first request of each prefix is among the first ones."""
    draw = random.Random(21)
    prefixes = [[draw.randrange(8, 4000) for _ in range(PREFIX)] for _ in range(PREFIXES)]
    order = [*range(PREFIXES), *draw.sample([*range(PREFIXES)] * (STREAMS // PREFIXES - 1), STREAMS - PREFIXES)]
    return [
        EngineCoreRequest(
            id=f"s{number}",
            prompt_ids=[*prefixes[prefix], *(draw.randrange(8, 4000) for _ in range(OWN))],
            params=SamplingParams(max_tokens=OUTPUT, temperature=float(number % 2), ignore_eos=True),
            seed=number,
        )
        for number, prefix in enumerate(order)
    ]


@asynccontextmanager
async def running(client: EngineClient) -> AsyncIterator[EngineClient]:
    try:
        await client.engine_core.start()
        yield client
    finally:
        await client.engine_core.stop()


async def generate_tokens(
    client: EngineClient, requests: Sequence[EngineCoreRequest], began: asyncio.Event | None = None
) -> Tokens:
    """Return the tokens by request id. `began` is set when the first tokens arrive."""
    tokens: Tokens = {request.id: [] for request in requests}
    async for outputs in client.submit(requests):
        for output in outputs:
            assert output.error is None
            tokens[output.id] += output.new_ids
        if began is not None:
            began.set()
    return tokens


async def hit_rate(client: EngineClient, requests: Sequence[EngineCoreRequest]) -> tuple[float, Tokens]:
    """Run the first request of each prefix, then all others at once; return the cache hit rate and the tokens."""
    before = client.engine_core.stats
    tokens = await generate_tokens(client, requests[:PREFIXES]) | await generate_tokens(client, requests[PREFIXES:])
    queries = client.engine_core.stats.prefix_queries - before.prefix_queries
    return (client.engine_core.stats.prefix_hits - before.prefix_hits) / queries, tokens


async def test_replicas_share_load_by_prefix_and_keep_tokens_after_kill() -> None:
    requests = streams()
    async with running(EngineClient(InProcessClient(CONFIG))) as one:
        single, expected = await hit_rate(one, requests)
    async with running(EngineClient(ReplicatedClient(CONFIG.model_copy(update={"data_parallel_size": 2})))) as client:
        together, tokens = await hit_rate(client, requests)
        assert tokens == expected
        assert together >= 0.9 * single > 0.5
        generated = [each.stats.generation_tokens for each in client.engine_core.engines]
        assert min(generated) > 0.2 * sum(generated), "both computed"

        began, weights = asyncio.Event(), Weights(client)
        again = asyncio.create_task(generate_tokens(client, requests, began))
        await began.wait()
        await weights.sleep()
        assert all(each.asleep for each in client.engine_core.engines)
        await weights.wake_up()
        assert await again == expected

        began.clear()
        again = asyncio.create_task(generate_tokens(client, requests, began))
        await began.wait()
        assert client.engine_core.pid is not None
        os.kill(client.engine_core.pid, signal.SIGKILL)
        assert await again == expected
        assert client.engine_core.deaths == 1
        assert client.engine_core.replays > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_answers_are_unchanged_when_replicas_are_killed(tmp_path: Path) -> None:
    flags = ("--threads", "2", "--tool-call-parser", "hermes")
    with Server(tmp_path / "one", *flags) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=280) as client:
            expected = {kind: await answer(client, asked) for kind, asked in KINDS.items()}
    rng = random.Random(2)
    with Server(tmp_path / "two", *flags, "--data-parallel-size", "2") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=280) as client:

            async def kill() -> None:
                for _ in range(KILLS):
                    while server.metric("quire:engine_responsive") < 2:  # noqa: ASYNC110 - a poll is soon enough
                        await asyncio.sleep(0.05)
                    await asyncio.sleep(rng.uniform(0.0, 1.0))
                    os.kill(rng.choice(server.engine_pids()), signal.SIGKILL)
                    for _ in range(20):
                        assert (await client.get("/health")).status_code == 200, "the other one works"
                        await asyncio.sleep(0.01)

            await ask_until(asyncio.create_task(kill()), client, expected, 32)
        assert server.metric("quire:engine_deaths_total") == KILLS
        assert server.metric("quire:quarantined_requests_total") == 0
        assert server.stop() == 0


def test_llm_with_data_parallel_replicas_equals_single_engine() -> None:
    prompts = [f"Number {number}: once upon a time" for number in range(12)]
    params = LLMParams(max_tokens=10, temperature=0.8, seed=3)
    token_ids = []
    for count in (1, 2):
        llm = LLM(data_parallel_size=count, num_kv_blocks=1024, max_num_seqs=16)
        token_ids.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        if count == 2:
            with pytest.raises(InvalidRequest, match="without multiprocessing or replicas"):
                llm.load_weights([])
        llm.close()
    assert token_ids[0] == token_ids[1]
