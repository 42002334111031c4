"""Metrics of HTTP requests and of the process, by the names that vLLM's dashboards query. Callers cannot add labels."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.server.observe.http_metrics import HttpMetrics, MergedHttpMetrics, without_process_gauges
from quire.server.observe.metric_sums import PeerSample
from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed


async def scrape(api: Api) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Return the values of samples by name and labels."""
    samples: dict[str, dict[frozenset[tuple[str, str]], float]] = defaultdict(dict)
    headers = {"Authorization": "Bearer key"}
    for family in text_string_to_metric_families((await api.http.get("/metrics", headers=headers)).text):
        for sample in family.samples:
            samples[sample.name][frozenset(sample.labels.items())] = sample.value
    return samples


def labels(**values: str) -> frozenset[tuple[str, str]]:
    return frozenset(values.items())


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
ROUTE = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_http_requests_are_counted_by_route_method_and_status_class(stream: bool) -> None:
    async with open_api(FakeEngine(hashed(b"abc"))) as api:
        body = {**CHAT, "stream": stream}
        answer = await api.http.post(ROUTE, json=body)
        await api.http.post(ROUTE, json={})
        samples = await scrape(api)
        assert samples["http_requests_total"][labels(handler=ROUTE, method="POST", status="2xx")] == 1
        assert samples["http_requests_total"][labels(handler=ROUTE, method="POST", status="4xx")] == 1
        assert samples["http_request_duration_seconds_count"][labels(handler=ROUTE, method="POST")] == 2
        assert samples["http_request_duration_seconds_bucket"][labels(handler=ROUTE, method="POST", le="+Inf")] == 2
        assert samples["http_request_duration_highr_seconds_count"][labels()] == 2
        assert samples["http_request_size_bytes_count"][labels(handler=ROUTE)] == 2
        assert samples["http_request_size_bytes_sum"][labels(handler=ROUTE)] == int(
            answer.request.headers["content-length"]
        ) + len(b"{}")
        content_length = int(answer.headers.get("content-length", 0))
        assert (content_length > 0) is not stream
        assert samples["http_response_size_bytes_sum"][labels(handler=ROUTE)] >= content_length
        assert samples["http_requests_inprogress"][labels()] == 0


async def test_callers_cannot_create_metric_labels() -> None:
    async with open_api(FakeEngine(hashed(b"abc")), api_key=["key"]) as api:
        for number in range(5):
            await api.http.get(f"/nothing/{number}", headers={"Authorization": "Bearer key"})
            await api.http.get(f"/v1/responses/resp_{number}", headers={"Authorization": "Bearer key"})
            await api.http.get(f"/web/{number}.js")
            await api.http.request(f"ODD{number}", "/v1/models", headers={"Authorization": "Bearer key"})
        await api.http.get("/v1/models")  # without a key: it never reaches its route
        for path in ("/health", "/metrics", "/load", "/version", "/ping"):
            await api.http.get(path, headers={"Authorization": "Bearer key"})
        samples = await scrape(api)
        assert samples["http_requests_total"] == {
            labels(handler="none", method="GET", status="4xx"): 5,
            labels(handler="/v1/responses/{response_id}", method="GET", status="4xx"): 5,
            labels(handler="/web", method="GET", status="4xx"): 5,
            labels(handler="/v1/models", method="UNKNOWN", status="4xx"): 5,
            labels(handler="/v1/models", method="GET", status="4xx"): 1,
        }


async def test_open_request_counts_as_in_progress() -> None:
    engine = FakeEngine(hashed(b"abc"), step_seconds=30)
    async with open_api(engine) as api:
        post_task = asyncio.create_task(api.http.post(ROUTE, json=CHAT))
        while not engine.seen:  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0)
        assert (await scrape(api))["http_requests_inprogress"][labels()] == 1
        post_task.cancel()
        await asyncio.gather(post_task, return_exceptions=True)


async def test_process_metrics_report_memory_cpu_and_fds(api: Api) -> None:
    samples = await scrape(api)
    for name in ("resident_memory_bytes", "virtual_memory_bytes", "cpu_seconds_total", "open_fds", "max_fds"):
        assert samples[f"process_{name}"][labels()] > 0
    assert samples["process_start_time_seconds"][labels()] > 1.6e9


def test_http_metrics_of_peers_are_merged() -> None:
    other = HttpMetrics([])
    other.count_request_start_if_tracked({"path": "/v1/models"})
    counts = [
        *(each for each in other.collect_samples() if not each.metric.startswith("process_")),
        PeerSample("process_start_time_seconds", "process_start_time_seconds", {}, 5.0),
        PeerSample("process_cpu_seconds", "process_cpu_seconds_total", {}, 1e6),
        PeerSample("http_requests", "http_requests_total", {"method": "GET", "status": "2xx", "handler": "/x"}, 3.0),
    ]
    samples = {
        each.name: each.value
        for metric in MergedHttpMetrics(HttpMetrics([]), counts).collect()
        for each in metric.samples
    }
    assert samples["http_requests_inprogress"] == 1
    assert samples["http_requests_total"] == 3
    assert samples["process_start_time_seconds"] == 5
    assert samples["process_cpu_seconds_total"] > 1e6
    left = {each.metric for each in without_process_gauges(counts)}
    assert "http_requests" in left
    assert not left & {"http_requests_inprogress", "process_start_time_seconds"}
