"""Every metric of a real server exists and counts what its name says."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import Server

pytestmark = pytest.mark.slow

PER_REQUEST = (
    *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_params_n", "request_params_max_tokens", "request_queue_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_kv_computed_tokens", "request_time_per_output_token_seconds"),
    *("request_max_num_generation_tokens", "request_num_preemptions"),
)
"""Histograms that count each request once."""
CROWD = 10
"""Concurrent requests; the KV blocks of at most two fit."""
CROWDED = {"num_requests_running": 2, "num_requests_waiting": 1, "kv_cache_usage_perc": 0.5}
CROWDED |= {"admission_rejections_total": 1}
"""Minimum that each metric reaches at some moment while the requests run."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    flags = ("--num-kv-blocks=14", "--max-model-len=200", "--threads=1", "--max-num-seqs=8", "--max-queued-requests=2")
    server = Server(tmp_path / "log", *flags)
    yield server
    assert server.stop() == 0


def scrape(server: Server) -> dict[str, float]:
    """Every sample by name, summed over its labels, without buckets; and `name:label` for samples that a label
    distinguishes.
    """
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")):
                continue
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
            for label in ("finished_reason", "source", "reason"):
                if label in sample.labels:
                    samples[f"{sample.name}:{sample.labels[label]}"] = sample.value
    return samples


def body(index: int, tokens: int) -> dict[str, Any]:
    """A request for `tokens` tokens with a prompt of 40 tokens that `index` selects."""
    prompt = list(range(20 + 50 * index, 60 + 50 * index))
    return {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": tokens}


async def ask(client: httpx.AsyncClient, count: int, tokens: int) -> None:
    answers = await asyncio.gather(*(client.post("/v1/completions", json=body(i, tokens)) for i in range(count)))
    assert {answer.status_code for answer in answers} == {200}


GUESSES = {f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")}
"""Metrics that stay 0 on a server without speculative decoding."""


async def stream(client: httpx.AsyncClient, tokens: int) -> None:
    async with client.stream("POST", "/v1/completions", json=body(0, tokens) | {"stream": True}) as response:
        assert response.status_code == 200
        assert [line async for line in response.aiter_lines() if line.startswith("data: {")]


async def test_metrics_count_requests_preemptions_and_engine_death(server: Server) -> None:
    seen = {name for name in scrape(server) if not name.startswith("quire:")}
    async with httpx.AsyncClient(base_url=server.url, timeout=240) as client:
        await stream(client, tokens=10)
        first = scrape(server)
        for name in PER_REQUEST:
            assert first[f"vllm:{name}_count"] == 1, name
        for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
            assert first[f"gen_ai_server_{name}_seconds_count"] == 1, name
        assert first["vllm:request_prompt_tokens_sum"] == first["vllm:prompt_tokens_total"] == 40
        assert first["vllm:generation_tokens_total"] == first["vllm:request_generation_tokens_sum"] == 10
        between = first["vllm:inter_token_latency_seconds_count"]
        assert between == 9, "the engine's steps count, however many come together"
        assert (first["vllm:iteration_tokens_total_count"], first["vllm:iteration_tokens_total_sum"]) == (10, 50)
        assert first["vllm:request_success_total:length"] == first["vllm:request_success_total"] == 1
        assert first["vllm:prefix_cache_queries_total"] == 40
        assert first["vllm:prompt_tokens_by_source_total:local_compute"] == 40
        assert first["vllm:prompt_tokens_cached_total"] == first["vllm:prefix_cache_hits_total"] == 0
        assert first["vllm:cache_config_info"] == 1
        times = ("queue", "prefill", "decode")
        parts = sum(first[f"vllm:request_{name}_time_seconds_sum"] for name in times)
        assert 0 < parts <= first["vllm:e2e_request_latency_seconds_sum"]

        await ask(client, 1, 1)
        again = scrape(server)
        assert again["vllm:prefix_cache_hits_total"] == again["vllm:prompt_tokens_cached_total"] == 32
        assert again["vllm:prompt_tokens_by_source_total:local_cache_hit"] == 32
        assert again["vllm:request_prefill_kv_computed_tokens_sum"] == 48
        assert again["vllm:request_time_per_output_token_seconds_count"] == 1, "one token has no time between"

        busy: dict[str, float] = {}
        rounds = 0
        while any(busy.get(f"vllm:{name}", 0) < least for name, least in CROWDED.items()):
            rounds += 1  # the requests may end before a scrape sees them
            assert rounds <= 20
            asking = asyncio.create_task(ask(client, CROWD, 120))
            while not asking.done():
                now = await asyncio.to_thread(scrape, server)
                if now["vllm:num_requests_waiting"] > 0 and not now["vllm:admission_rejections_total"]:
                    await client.post("/v1/completions", json=body(0, 1) | {"n": CROWD})  # rejected if they still wait
                busy = {name: max(busy.get(name, 0.0), value) for name, value in now.items()}
            await asking
        assert busy["vllm:num_requests_waiting_by_reason:capacity"] >= 1
        assert busy["vllm:kv_cache_usage_perc"] <= 1
        after = scrape(server)
        assert after["vllm:num_preemptions_total"] == after["vllm:request_num_preemptions_sum"] > 0
        assert after["vllm:admission_rejections_total:max_num_queued_reqs"] >= 1
        assert between < after["vllm:inter_token_latency_seconds_count"] <= between + rounds * CROWD * 119 + CROWD
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert after[f"vllm:{name}"] == 0, name

        asking = asyncio.create_task(ask(client, CROWD, 120))
        while await asyncio.to_thread(server.metric, "vllm:num_requests_running") == 0:
            assert not asking.done()
        os.kill(server.engine_pid(), signal.SIGKILL)
        await asking
        last = scrape(server)
        assert last["quire:engine_deaths_total"] == 1
        assert 1 <= last["quire:request_replays_total"] <= CROWD
        generated = last["vllm:generation_tokens_total"] - after["vllm:generation_tokens_total"]
        assert generated >= CROWD * 119, "counters go on"
        moved = {name for name in seen if last[name] != first[name] or last[name] != 0 or busy[name] != 0}
        still = {name for name in seen - moved if ":" not in name.removeprefix("vllm:")} - GUESSES
        assert still == set(), "every one of vLLM's has moved"


@pytest.fixture
def guessing(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "log", "--num-kv-blocks=100", "--threads=1", "--speculative-config=ngram")
    yield server
    assert server.stop() == 0


def test_draft_token_metrics_equal_explain_counts(guessing: Server) -> None:
    request_body = {"prompt": "Once", "max_tokens": 60, "allowed_token_ids": [40]}
    answer = httpx.post(f"{guessing.url}/v1/completions", json=request_body, timeout=60).json()
    names = ("drafts", "draft_tokens", "accepted_tokens")
    drafts, drafted, accepted = (guessing.metric(f"vllm:spec_decode_num_{name}_total") for name in names)
    assert 0 < drafts < accepted <= drafted
    assert guessing.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total") == accepted
    (sequence,) = guessing.get(f"/v1/requests/{answer['id']}/explain").json()["sequences"]
    assert (sequence["draft_tokens"], sequence["accepted_draft_tokens"]) == (drafted, accepted)
    assert sequence["accepted_draft_tokens_by_source"] == {"model": 0, "lookup": accepted, "grammar": 0}
