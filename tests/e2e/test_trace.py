"""`quire trace` records a real server."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx
import pytest

from quire.server.cli import main as cli
from tests.e2e.server import Server
from tests.server.observe.test_engine_trace import check

pytestmark = pytest.mark.slow


def test_trace_command_records_engine_steps_and_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(tmp_path / "log", "--api-key", "secret")
    headers = {"Authorization": "Bearer secret"}
    body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "n": 3}
    asking = threading.Thread(
        target=lambda: httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=None)
    )
    asking.start()
    out = tmp_path / "trace.json"
    assert cli.main(["trace", "--url", server.url, "--seconds", "1", "-o", str(out), "--api-key", "secret"]) == 0
    asking.join()
    trace = json.loads(out.read_text())
    check(trace)
    phases, seconds = trace["otherData"]["phases_seconds"], trace["otherData"]["seconds"]
    assert phases.keys() == {"between steps", "schedule", "compute", "apply"}
    assert sum(phases.values()) == pytest.approx(seconds, abs=0.001), "no moment is left out or counted twice"
    steps = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == "step"]
    assert max(event["args"]["rows"] for event in steps) == 3
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert cli.main(["trace", "--url", server.url, "--api-key", "wrong"]) == 1
    assert "Incorrect API key provided (--api-key KEY" in capsys.readouterr().err
    assert cli.main(["trace", "--url", server.url, "--seconds", "999", "--api-key", "secret"]) == 1
    assert "seconds" in capsys.readouterr().err
    assert server.stop() == 0
