"""JSON logs with request ids, and OpenTelemetry spans as an OTLP receiver gets them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from quire.engine.client.engine_client import EngineClient
from quire.engine.common.errors import ConfigError
from quire.engine.core.stats import EngineStats
from quire.server.observe.log_setup import JsonFormatter
from quire.server.observe.request_log import access_log
from quire.server.observe.request_spans import create_otlp_exporter
from quire.server.observe.throughput_log import format_throughput, log_throughput_periodically
from tests.server.api import open_api
from tests.server.fake import FakeEngine, hashed

BODY = {"prompt": "a secret prompt", "max_tokens": 5}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    access_log.addHandler(handler)
    access_log.setLevel(logging.INFO)
    yield stream
    access_log.removeHandler(handler)


async def test_json_access_log_has_request_id_and_no_prompt(lines: io.StringIO) -> None:
    async with open_api(FakeEngine(hashed(b"abc")), log_format="json", api_key_file=None, api_key=["k"]) as api:
        headers = {"Authorization": "Bearer k", "X-Request-Id": "mine"}
        answer = await api.http.post("/v1/completions", json=BODY, headers=headers)
        await api.http.get("/health")
        await api.http.get("/v1/models", headers={"X-Request-Id": "other"})
    done, refused = (json.loads(line) for line in lines.getvalue().splitlines())
    assert (done["request_id"], done["answer_id"], done["tenant"]) == ("mine", answer.json()["id"], "key-1")
    assert (done["level"], done["path"], done["status"]) == ("info", "/v1/completions", 200)
    assert done["milliseconds"] > 0
    assert (refused["request_id"], refused["status"]) == ("other", 401)
    assert "secret" not in lines.getvalue()


async def test_access_log_has_no_web_files_unless_they_are_missing(lines: io.StringIO) -> None:
    paths = ("/", "/web/js/app.js", "/v1/engine/requests", "/web/js/missing.js")
    async with open_api(FakeEngine(hashed(b"abc"))) as api:
        for path in paths:
            await api.http.get(path)
    logged = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [(each["path"], each["status"]) for each in logged] == [
        ("/", 200),
        ("/v1/engine/requests", 200),
        ("/web/js/missing.js", 404),
    ]


async def test_url_cannot_inject_access_log_line(lines: io.StringIO) -> None:
    async with open_api(FakeEngine(hashed(b"abc"))) as api:
        await api.http.get("/v1/files/a%0Ab%1B%5B2J%C3%A4")
    (line,) = (json.loads(line) for line in lines.getvalue().splitlines())
    assert line["message"].startswith("GET /v1/files/a%0Ab%1B[2J\u00e4 404 in")
    assert line["path"] == "/v1/files/a\nb\x1b[2J\u00e4"


async def test_disable_access_log_writes_nothing(lines: io.StringIO) -> None:
    async with open_api(FakeEngine(hashed(b"abc")), disable_access_log=True) as api:
        await api.post("/v1/completions", BODY)
    assert lines.getvalue() == ""


async def test_throughput_is_logged_only_while_requests_run(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(hashed(b"abc"))
    with caplog.at_level(logging.INFO, "quire.throughput"):
        log_task = asyncio.create_task(log_throughput_periodically(EngineClient(engine), 0.01))
        await asyncio.sleep(0.05)
        assert caplog.messages == []
        engine.stats = EngineStats(running=2, waiting=1, steps=5, used_blocks=1, total_blocks=4)
        async with asyncio.timeout(10):
            while not caplog.messages:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        log_task.cancel()
    assert caplog.messages[0] == "0 prompt and 0 generated tokens/s; 2 running, 1 waiting; KV cache 25 %"


def test_throughput_line_reports_rates_and_hit_ratios() -> None:
    before = EngineStats(prompt_tokens=100, generation_tokens=50, prefix_queries=100, prefix_hits=10)
    now = EngineStats(
        prompt_tokens=1100,
        generation_tokens=70,
        prefix_queries=500,
        prefix_hits=110,
        draft_tokens=8,
        accepted_drafts=[4, 2],
    )
    expected = (
        "100 prompt and 2 generated tokens/s; 0 running, 0 waiting; KV cache 0 %, prefix hits 25 %, "
        "drafts accepted 75 %"
    )
    assert format_throughput(before, now, 10) == expected


def test_json_log_keeps_exception_on_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("quire", logging.ERROR, "f", 1, "it %s", ("failed",), info)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert json.loads(text)["message"] == "it failed"
    assert "ValueError" in json.loads(text)["exception"]


class Receiver:
    """An OTLP receiver over HTTP that keeps the spans it gets."""

    def __init__(self) -> None:
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        spans: list[Any] = []
        self.services = services = set[str]()
        paths: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    data = gzip.decompress(data)
                for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                    facts = {each.key: each.value.string_value for each in resource.resource.attributes}
                    services.add(facts["service.name"])
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                paths.append(self.path)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.spans, self.paths = spans, paths
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


async def test_otlp_spans_are_children_of_caller_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    receiver = Receiver()
    engine = FakeEngine(hashed(b"abc"))
    async with open_api(engine, otlp_traces_endpoint=receiver.url) as api:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        answer = await api.http.post("/v1/completions", json=BODY | {"n": 2}, headers=headers)
        await api.http.get("/v1/models")
        alone = await api.http.post("/v1/completions", json=BODY, headers={"traceparent": "nonsense"})
    receiver.server.shutdown()
    assert set(receiver.paths) == {"/v1/traces"}
    assert receiver.services == {"quire"}
    roots = [span for span in receiver.spans if span.name == "llm_request"]
    root = next(span for span in roots if span.trace_id.hex() == TRACE)
    assert root.parent_span_id.hex() == PARENT
    attributes = {each.key: each.value for each in root.attributes}
    assert attributes["gen_ai.response.id"].string_value == answer.json()["id"]
    assert attributes["gen_ai.provider.name"].string_value == "quire"
    assert attributes["gen_ai.operation.name"].string_value == "text_completion"
    assert attributes["gen_ai.usage.cache_read.input_tokens"].int_value == len("a secret prompt") // 2
    assert attributes["quire.request_id"].string_value == "mine"
    assert attributes["gen_ai.usage.output_tokens"].int_value == 2 * 5, "of both choices"
    assert attributes["http.response.status_code"].int_value == 200
    children = [span for span in receiver.spans if span.parent_span_id == root.span_id]
    assert [span.name for span in children] == ["queued", "decode", "delivery"] * 2
    for span in children:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano
    (other,) = [span for span in roots if span is not root]
    assert other.parent_span_id == b""
    assert {each.key: each.value.string_value for each in other.attributes}["gen_ai.request.id"] == alone.json()["id"]


def test_invalid_otlp_endpoint_is_rejected() -> None:
    for wrong in ("localhost:4317", "ftp://x", ""):
        with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
            create_otlp_exporter(wrong)
