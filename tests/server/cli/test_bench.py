"""`quire bench` against a small scripted server; its arithmetic on hand-computed numbers."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvloop

from quire.engine.common.errors import ConfigError, EngineError
from quire.server.cli.bench import bench_report, start
from quire.server.cli.bench.latency_stats import (
    BenchAnswer,
    BenchFailure,
    arrival_times,
    latency_distribution,
    percentile,
    summarize,
)
from quire.server.cli.bench.serve import ReceivedStream
from quire.server.cli.bench.start import measure_time_to_first_token
from quire.server.cli.bench.stream_client import StreamClient, StreamError
from quire.server.cli.bench.workload import random_prompts_and_warmup, read_jsonl_prompts
from quire.server.cli.main import main
from tests.e2e.server import children
from tests.server.cli.processes import needs_proc, wait_until_gone

Script = Callable[[str, dict[str, Any]], bytes]
"""From path and body of a request to the bytes of its whole HTTP response."""


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def sse(*events: bytes, done: bool = True) -> bytes:
    """A response in HTTP chunks that are cut independently of its events."""
    body = b"".join(events) + (b"data: [DONE]\n\n" if done else b"")
    pieces = [body[at : at + 37] for at in range(0, len(body), 37)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + chunks + b"0\r\n\r\n"


def plain(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def tokens(body: dict[str, Any]) -> bytes:
    """As many chunks as requested, an opening chunk, and a usage."""
    count = body["max_tokens"]
    usage = {"prompt_tokens": len(body.get("prompt", "four")), "completion_tokens": count}
    if "messages" in body:
        chunks = [event(choices=[{"delta": {"role": "assistant", "content": ""}}])]
        chunks += [event(choices=[{"delta": {"content": "a"}}]) for _ in range(count)]
    else:
        chunks = [event(choices=[{"text": ""}]) for _ in range(count)]
    return sse(*chunks, event(choices=[], usage=usage))


@dataclass
class FakeServer:
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    most_open: int = 0
    loop: asyncio.AbstractEventLoop = field(init=False)
    stop: asyncio.Event = field(init=False)


@contextmanager
def serving(script: Script, *, linger: bool = True) -> Iterator[FakeServer]:
    """A server in a thread. `linger`: connections stay open after a response."""
    server = FakeServer()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [line.split(":")[1] for line in head.splitlines() if line.startswith("Content-Length")]
                text = await reader.readexactly(int(lengths[0])) if lengths else b"{}"
                if head.startswith("GET"):
                    writer.write(plain("200 OK", b'{"data": [{"id": "fake"}]}'))
                else:
                    server.heads.append(head)
                    server.bodies.append(json.loads(text))
                    server.open += 1
                    server.most_open = max(server.open, server.most_open)
                    await asyncio.sleep(0.02)
                    writer.write(script(head.split()[1], server.bodies[-1]))
                    server.open -= 1
                if not linger or "connection: close" in head.lower():
                    break
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    started = threading.Event()

    async def run() -> None:
        server.stop = asyncio.Event()
        server.loop = asyncio.get_running_loop()
        listener = await asyncio.start_server(handle, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        started.set()
        await server.stop.wait()
        listener.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    started.wait()
    try:
        yield server
    finally:
        server.loop.call_soon_threadsafe(server.stop.set)
        thread.join()


def bench(server: FakeServer, *flags: str, tmp_path: Path) -> tuple[int, dict[str, Any]]:
    """Exit status and the JSON that --json wrote."""
    out = tmp_path / "out.json"
    status = main(["bench", "serve", "--url", server.url, "--json", str(out), *flags])
    return status, json.loads(out.read_text())


def test_percentile_returns_measured_value() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, percent) for percent in (0, 50, 90, 99, 100)] == [1, 51, 91, 100, 100]
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0


def test_latency_distribution_is_in_milliseconds_for_unsorted_values() -> None:
    report = latency_distribution([0.003, 0.001, 0.002])
    assert report is not None
    assert (report.mean, report.p50, report.p90, report.max) == pytest.approx((2, 2, 3, 3))
    assert latency_distribution([]) is None


def test_summary_computes_throughput_and_latencies_of_answered_requests() -> None:
    results = [
        BenchAnswer([0.1, 0.2, 0.4], prompt_tokens=10, completion_tokens=3),
        BenchAnswer([0.3, 0.5], prompt_tokens=20, completion_tokens=5),  # several tokens in a chunk
        BenchFailure("HTTP 503"),
    ]
    summary = summarize(results, seconds=2.0)
    assert (summary.requests, summary.failed, summary.errors) == (2, 1, {"HTTP 503": 1})
    assert (summary.output_tokens_per_second, summary.total_tokens_per_second) == (4.0, 19.0)
    assert summary.requests_per_second == 1.0
    means = [summary.ttft_ms, summary.itl_ms, summary.tpot_ms, summary.e2e_ms]
    assert [part and part.mean for part in means] == pytest.approx([200, 500 / 3, 100, 450])


def test_summary_of_failures_alone_has_no_latencies() -> None:
    summary = summarize([BenchFailure("a"), BenchFailure("a"), BenchFailure("b")], seconds=1.0)
    assert summary.errors == {"a": 2, "b": 1}
    assert (summary.output_tokens_per_second, summary.ttft_ms, summary.itl_ms) == (0, None, None)


def test_arrival_times_are_poisson_at_rate_and_reproducible_by_seed() -> None:
    times = arrival_times(20_000, rate=50.0, seed=1)
    assert times == sorted(times)
    assert 20_000 / times[-1] == pytest.approx(50, rel=0.05)
    gaps = [after - before for before, after in pairwise(times)]
    assert sum(gap > 1 / 50 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)  # 1/e for exponential gaps
    assert times == arrival_times(20_000, rate=50.0, seed=1) != arrival_times(20_000, rate=50.0, seed=2)


def workload(**changes: int) -> argparse.Namespace:
    return argparse.Namespace(
        **{"num_requests": 5, "warmup": 2, "input_len": 20, "shared_prefix": 8, "seed": 0} | changes
    )


def test_random_prompts_share_only_prefix_and_depend_on_seed() -> None:
    measured, warming = random_prompts_and_warmup(workload(), vocab=50)
    everything = measured + warming
    assert [len(prompts) for prompts in (measured, warming)] == [5, 2]
    assert all(len(ids) == 20 and min(ids) >= 10 and max(ids) < 50 for ids in everything)
    assert len({tuple(ids[:8]) for ids in everything}) == 1
    assert len({tuple(ids[8:]) for ids in everything}) == 7
    assert random_prompts_and_warmup(workload(), vocab=50)[0] == measured
    assert random_prompts_and_warmup(workload(seed=1), vocab=50)[0] != measured


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ('\n{"text": "a"}', "line 2: must be an object with either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "line 1: must be"),
        ("[]", "line 1: must be"),
        ("\n", "holds no prompts"),
        (None, "cannot read"),
    ],
)
def test_invalid_prompts_file_raises_config_error(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_jsonl_prompts(path)


def test_closed_loop_bench_counts_tokens_and_limits_concurrency(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(lambda _, body: tokens(body)) as server:
        flags = ("--concurrency", "3", "--num-requests", "7", "--input-len", "12", "--output-len", "5", "--warmup", "1")
        status, report = bench(server, *flags, "--label", "mine", "--api-key", "k", tmp_path=tmp_path)
    assert status == 0
    assert (report["requests"], report["failed"]) == (7, 0)
    assert (report["prompt_tokens"], report["output_tokens"]) == (84, 35)
    assert report["output_tokens_per_second"] == pytest.approx(35 / report["seconds"])
    assert report["ttft_ms"]["p50"] >= 20
    assert report["itl_ms"]["max"] < report["e2e_ms"]["max"]
    assert (report["settings"]["label"], report["settings"]["concurrency"]) == ("mine", 3)
    assert "api_key" not in report["settings"]
    assert server.most_open == 3
    warmup, *measured = server.bodies
    assert (warmup["max_tokens"], len(measured)) == (4, 7)
    for body in measured:
        assert len(body.pop("prompt")) == 12
        assert body == {
            "model": "fake",
            "max_tokens": 5,
            "min_tokens": 5,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    assert all("Authorization: Bearer k" in head for head in server.heads)
    printed = capsys.readouterr().out
    assert "mine: fake, concurrency 3, 12/5" in printed
    assert "7 answered, 0 failed" in printed
    assert "\ntime to first token  " in printed
    assert all(line == line.rstrip() for line in printed.splitlines())


def test_open_loop_bench_sends_without_waiting_for_responses(tmp_path: Path) -> None:
    with serving(lambda _, body: tokens(body)) as server:
        flags = ("--request-rate", "100000", "--num-requests", "10", "--output-len", "2", "--warmup", "0")
        status, report = bench(server, *flags, tmp_path=tmp_path)
    assert (status, report["requests"], report["output_tokens"]) == (0, 10, 20)
    assert server.most_open == 10


def test_prompts_from_file_are_sent_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    talk = [{"role": "user", "content": "hi"}]
    path.write_text(json.dumps({"prompt": "Once", "top_p": 0.5}) + "\n" + json.dumps({"messages": talk}) + "\n")
    with serving(lambda _, body: tokens(body)) as server:
        flags = ("--prompts", str(path), "--num-requests", "3", "--concurrency", "1", "--warmup", "0")
        status, report = bench(server, *flags, "--output-len", "6", "--model", "m", tmp_path=tmp_path)
    assert status == 0
    assert [head.split()[1] for head in server.heads] == ["/v1/completions", "/v1/chat/completions", "/v1/completions"]
    first, second, third = server.bodies
    assert (first["prompt"], first["top_p"], second["messages"]) == ("Once", 0.5, talk)
    assert first == third
    assert not {"ignore_eos", "min_tokens"} & (first.keys() | second.keys())
    assert report["output_tokens"] == 18


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (plain("503 Service Unavailable", b'{"error": "full"}'), 'HTTP 503 {"error": "full"}'),
        (plain("200 OK", b"{}"), "the stream ended without [DONE]"),
        (sse(event(choices=[{"text": "a"}]), done=False), "the stream ended without [DONE]"),
        (sse(event(choices=[{"text": "a"}]), event(error={"message": "died"})), "died"),
        (sse(b"data: {nonsense\n\n"), "malformed"),
        (sse(b"data: [1]\n\n"), "Expected `object`"),
        (sse(event(choices=[], usage={"prompt_tokens": 1})), "an answer without a token"),
        (b"SMTP ready\r\n\r\n", ""),
        (sse(event(choices=[{"text": "a"}]))[:120], "closed before the end"),
        (b"", "closed before the end"),
    ],
)
def test_failed_responses_are_counted_and_reported(answer: bytes, message: str, tmp_path: Path) -> None:
    """Half of the requests get this response; the other half succeed."""
    turns = iter(range(100))
    with serving(lambda _, body: answer if next(turns) % 2 else tokens(body), linger=False) as server:
        flags = ("--num-requests", "4", "--concurrency", "1", "--output-len", "3", "--warmup", "0")
        status, report = bench(server, *flags, tmp_path=tmp_path)
    assert status == 1
    assert (report["requests"], report["failed"], report["output_tokens"]) == (2, 2, 6)
    ((text, count),) = report["errors"].items()
    assert count == 2
    assert message in text


def test_bench_stops_when_warmup_fails() -> None:
    with serving(lambda *_: plain("404 Not Found", b"who?")) as server:
        client_flags = ["bench", "serve", "--url", server.url]
        assert main(client_flags) == 1
        assert len(server.bodies) == 1


def test_bench_without_server_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", "--model", "m"]) == 1
    assert capsys.readouterr().err.startswith("quire bench: a request to warm up failed: cannot connect")


async def post(client: StreamClient, count: int) -> list[ReceivedStream]:
    streams = [ReceivedStream() for _ in range(count)]
    for stream in streams:
        await client.post_stream("completions", b'{"max_tokens": 2}', stream.add_event)
    client.close()
    return streams


async def test_stream_client_reuses_connection_only_with_keep_alive() -> None:
    for keep_alive, connections in ((True, 1), (False, 3)):
        with serving(lambda _, body: tokens(body)) as server:
            streams = await post(StreamClient(server.url, keep_alive=keep_alive), 3)
        assert [len(stream.chunk_times) for stream in streams] == [2, 2, 2]
        assert server.connections == connections


async def test_stream_client_reconnects_after_server_closes_idle_connection() -> None:
    with serving(lambda _, body: tokens(body), linger=False) as server:
        streams = await post(StreamClient(server.url + "/v1/"), 3)
    assert [len(stream.chunk_times) for stream in streams] == [2, 2, 2]
    assert [head.split()[1] for head in server.heads] == ["/v1/completions"] * 3


async def test_refused_connection_raises_stream_error_without_status() -> None:
    with pytest.raises(StreamError, match="cannot connect") as caught:
        await post(StreamClient("http://127.0.0.1:9"), 1)
    assert caught.value.status is None


@pytest.mark.parametrize("url", ["localhost:port", "ftp://host", "http://"])
def test_stream_client_rejects_invalid_url(url: str) -> None:
    with pytest.raises(ConfigError, match="url: not a server's"):
        StreamClient(url)


@pytest.mark.parametrize(
    "flags", [["--concurrency", "0"], ["--request-rate", "-1"], ["--input-len", "4", "--shared-prefix", "5"]]
)
def test_invalid_bench_flag_exits_2(flags: Sequence[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "serve", *flags])
    assert caught.value.code == 2


def test_unwritable_report_path_is_rejected_before_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        bench_report.check_report_paths(tmp_path / "no" / "out.json")
    monkeypatch.setattr(bench_report, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--png needs matplotlib.*pip install"):
        bench_report.check_report_paths(None, tmp_path / "out.png")


def test_latency_plot_is_saved_as_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    bench_report.save_latency_plot(path, "a title", {"ttft_ms": [0.1, 0.2], "itl_ms": [], "e2e_ms": [1.0]})
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_bench_offline_reports_throughput_of_in_process_engine(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--num-requests", "3", "--input-len", "9", "--output-len", "4", "--json", str(out)]
    engine = ["--max-model-len", "64", "--num-kv-blocks", "32", "--threads", "1"]
    assert main(["bench", "offline", *flags, *engine]) == 0
    report = json.loads(out.read_text())
    assert report["output_tokens"] == 12
    assert report["total_tokens_per_second"] == pytest.approx(report["output_tokens_per_second"] * 39 / 12)


SLOW_SERVER = """
import http.server, subprocess, sys, pathlib
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[2]).write_text(str(child.pid))
refusals = [503, 503]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        status = refusals.pop() if refusals else 200
        self.send_response(status)
        self.end_headers()
        if status == 200:
            self.wfile.write(b'data: {"choices": [{"text": "a"}]}\\n\\ndata: [DONE]\\n\\n')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@needs_proc
def test_bench_start_waits_for_first_token_and_ends_server_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server has a child, refuses twice before it answers, and ends its responses by closing the connection."""
    pid_file, out = tmp_path / "pid", tmp_path / "out.json"
    command = [sys.executable, "-c", SLOW_SERVER, "{port}", str(pid_file)]
    assert main(["bench", "start", "--runs", "2", "--json", str(out), "--", *command]) == 0
    report = json.loads(out.read_text())
    assert len(report["seconds"]) == 2
    assert report["min"] <= report["median"] <= report["max"]
    assert "median" in capsys.readouterr().out
    wait_until_gone(int(pid_file.read_text()))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([sys.executable, "-c", "print('no weights'); raise SystemExit(3)", "{port}"], "(?s)status 3.*no weights"),
        ([sys.executable, "-c", "import time; time.sleep(600)", "{port}"], "no token in time; last: cannot connect"),
    ],
)
def test_bench_start_reports_server_that_does_not_start(command: list[str], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        measure_time_to_first_token(command, None, 10.0 if "status" in message else 0.2)


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_bench_start_ends_server(number: signal.Signals) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)", "{port}"]
    command = [sys.executable, "-m", "quire", "bench", "start", "--", *sleeper]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not (started := children(process.pid)):
        time.sleep(0.05)
    time.sleep(0.5)  # the signal arrives in the loop or before it
    process.send_signal(number)
    assert process.wait(60) == 130
    wait_until_gone(started[0])


def test_bench_start_does_not_wait_for_server_with_http_500() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        serving(lambda *_: plain("500 Oops", b"broken")) as server,
        open(os.devnull, "wb") as log,
        start.run_process(command, log) as process,
        pytest.raises(EngineError, match="refuses: HTTP 500 broken"),
    ):
        uvloop.run(start._wait_for_first_token(server.url, None, process, float("inf")))


@pytest.mark.parametrize("command", [["serve-something"], ["no-such-command-at-all", "{port}"]])
def test_bench_start_fails_for_command_that_cannot_start(command: list[str]) -> None:
    assert main(["bench", "start", "--", *command]) == 1


@pytest.mark.parametrize(("argv", "status"), [([], 2), (["--help"], 0), (["nonsense"], 2)])
def test_bench_without_subcommand_lists_subcommands(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == status
    printed = capsys.readouterr()
    assert "offline" in (printed.err if status else printed.out)


SHARE = [
    {"conversations": [{"from": "human", "value": "a" * 40}, {"from": "gpt", "value": "b" * 80}]},
    {"conversations": [{"from": "human", "value": "too short"[:3]}, {"from": "gpt", "value": "b" * 80}]},
    {"conversations": [{"from": "human", "value": "alone"}]},
    {"conversations": [{"from": "human", "value": "c" * 9000}, {"from": "gpt", "value": "d"}]},
]


def test_vllm_bench_flags_save_result_in_vllm_format(tmp_path: Path) -> None:
    with serving(lambda _, body: tokens(body)) as server:
        flags = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--dataset-name", "random")
        more = ("--random-input", "12", "--random-output", "5", "--num-prompt", "4", "--request-rate", "inf")
        saved = ("--save-result", "--result-dir", str(tmp_path / "out"), "--result-filename", "r.json")
        others = ("--metadata", "a=b", "--goodput", "ttft:100000", "--metric-percentiles", "50,99", "--ignore-eos")
        unneeded = ("--trust-remote-code", "--tokenizer", "x", "--disable-tqdm", "--percentile-metrics", "ttft,tpot")
        body = ("--extra-body", '{"user": "me"}', "--top-p", "0.9", "--num-warmups", "0")
        argv = (*flags, *more, *saved, *others, *unneeded, *body)
        assert bench(server, *argv, tmp_path=tmp_path)[0] == 0
    assert server.most_open == 4
    assert len(server.bodies) == 4
    assert {(each["max_tokens"], each["user"], each["top_p"]) for each in server.bodies} == {(5, "me", 0.9)}
    assert all(len(each["messages"][0]["content"].split()) == 12 for each in server.bodies)
    result = json.loads((tmp_path / "out" / "r.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 20)
    assert (result["request_rate"], result["max_concurrency"], result["a"]) == ("inf", 4, "b")
    assert result["request_goodput"] == pytest.approx(4 / result["duration"])
    assert result["p50_ttft_ms"] <= result["p99_ttft_ms"]
    assert result["mean_e2el_ms"] > result["median_itl_ms"] > 0
    assert result["output_throughput"] == pytest.approx(20 / result["duration"])


def test_sharegpt_prompts_request_output_length_of_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "share.json"
    path.write_text(json.dumps(SHARE))

    def script(url: str, body: dict[str, Any]) -> bytes:
        if url.endswith("tokenize"):
            return plain("200 OK", b'{"count": %d}' % (len(body["prompt"]) // 4))
        return tokens(body)

    with serving(script) as server:
        flags = ("--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "3", "--warmup", "0")
        status, report = bench(server, *flags, "--model", "m", tmp_path=tmp_path)
        assert (status, report["requests"]) == (0, 3)
        generations = [each for each in server.bodies if "max_tokens" in each]  # the others counted tokens
        assert {(each["prompt"], each["max_tokens"]) for each in generations} == {("a" * 40, 20)}
        assert "ignore_eos" not in generations[0]
        path.write_text("{}")
        assert main(["bench", "serve", "--url", server.url, *flags, "--model", "m"]) == 1
        assert "must be a JSON list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--dataset-name", "hf", "--dataset-path", "OWNER/SET"], "hf would be downloaded"),
        (["--dataset-name", "sharegpt"], "sharegpt needs --dataset-path"),
        (["--goodput", "speed:3"], "must be ttft:MS"),
        (["--extra-body", "3"], "must be a JSON object"),
    ],
)
def test_unsupported_bench_arguments_exit_with_message(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", *argv])
    assert said in capsys.readouterr().err
