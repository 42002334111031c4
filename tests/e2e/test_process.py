"""The server as a process: how it ends, and what happens to the engine process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.killer.sitecustomize import SEEDS
from tests.e2e.server import Server
from tests.e2e.test_killers import ENV
from tests.server.cli.processes import wait_until_gone

pytestmark = pytest.mark.slow


def test_sigterm_drains_running_requests_and_exits_0(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "--shutdown-timeout=300")
    engine = server.engine_pid()
    answer: list[httpx.Response] = []
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "n": 8}
    asking = threading.Thread(
        target=lambda: answer.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=120))
    )
    asking.start()
    while server.metric("vllm:num_requests_running") == 0 and asking.is_alive():
        time.sleep(0.01)
    assert asking.is_alive()
    assert server.stop(signal.SIGTERM) == 0
    asking.join()
    assert answer[0].json()["usage"]["completion_tokens"] == 8 * 1900
    wait_until_gone(engine)


def test_open_engine_event_stream_does_not_delay_shutdown(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "--shutdown-timeout", "1000")
    with httpx.stream("GET", f"{server.url}/v1/engine/events", timeout=120) as events:
        lines = events.iter_lines()
        assert next(lines) == "event: hello"
        assert server.stop(signal.SIGTERM) == 0
        assert list(lines), "what was under way, and an end"


def test_draining_server_returns_503_and_ends_late_streams_with_error(tmp_path: Path) -> None:
    """Health and new requests on open connections return 503. Requests that do not finish in time end with an error."""
    server = Server(tmp_path / "log", "--shutdown-timeout=4", "--threads=1")
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 40}
    path = f"{server.url}/v1/completions"
    with httpx.Client(timeout=120) as client, client.stream("POST", path, json=body) as response:
        events = (line for line in response.iter_lines() if line)
        next(events)
        server.process.send_signal(signal.SIGTERM)
        while (health := client.get(f"{server.url}/health")).status_code == 200:
            time.sleep(0.01)
        assert health.status_code == 503
        assert client.get(f"{server.url}/live").status_code == 200
        refused = client.post(path, json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert "Retry-After" in refused.headers
        *_, last = events
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "The server is shutting down"
    assert server.process.wait(60) == 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda sent: sent.name)
def test_second_signal_ends_draining_server_at_once(sent: signal.Signals, tmp_path: Path) -> None:
    server = Server(tmp_path / "log", "--shutdown-timeout=1000", "--threads=1")
    engine = server.engine_pid()
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 40}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(sent)
        while server.healthy():
            time.sleep(0.01)
        assert server.stop(sent) == 130
    assert "draining: " in server.log.read_text()
    wait_until_gone(engine)


def test_engine_hanging_with_gil_does_not_outlive_killed_server(tmp_path: Path) -> None:
    with Server(tmp_path / "log", "--engine-heartbeat-timeout=1000", env=ENV) as server:
        engine = server.engine_pid()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "seed": SEEDS["silence"]}, timeout=2)
        os.kill(engine, 0)  # it lives
    wait_until_gone(engine)


def test_stream_continues_after_engine_kill(tmp_path: Path) -> None:
    server = Server(tmp_path / "log")
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "seed": 4, "temperature": 1.0}
    whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
    text = ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=120) as response:
        for number, line in enumerate(line for line in response.iter_lines() if line.startswith("data: {")):
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if number == 20:
                os.kill(server.engine_pid(), signal.SIGKILL)
    assert text == whole
    assert server.metric("quire:engine_deaths_total") == 1
    assert server.healthy()
    assert server.stop() == 0


def test_serve_with_bad_settings_fails_without_traceback(tmp_path: Path) -> None:
    def fail(*args: str) -> str:
        completed = subprocess.run(
            [str(Path(sys.executable).with_name("quire")), "serve", *args],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"COLUMNS": "200"},
        )
        assert completed.returncode != 0
        assert "Traceback" not in completed.stderr
        return completed.stderr

    assert "max_model_len" in fail("--max-model-len", "99999").replace("-", "_")
    assert "no-such-model" in fail("/no-such-model")
    assert "port" in fail("--port", "many")


def test_health_is_503_while_engine_is_stopped_until_replaced(tmp_path: Path) -> None:
    """A stopped engine is detected within the heartbeat timeout, while the server itself keeps answering."""
    server = Server(tmp_path / "log", "--engine-heartbeat-timeout", "1")
    os.kill(server.engine_pid(), signal.SIGSTOP)
    while server.healthy():
        time.sleep(0.02)
    answers = {path: server.get(path).status_code for path in ("/health", "/ready", "/ping", "/live")}
    assert answers == {"/health": 503, "/ready": 503, "/ping": 503, "/live": 200}
    while not server.healthy():
        time.sleep(0.02)
    body = {"prompt": "Once", "max_tokens": 5}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).status_code == 200
    assert server.stop() == 0
