"""`curl --retry` with an Idempotency-Key resumes the same answer after the whole server was killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.e2e.test_batches import SMALL, kill_all
from tests.server.cli.processes import needs_proc

BODY = {"model": "quire-demo", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "temperature": 1}
RETRY = ["--retry", "120", "--retry-delay", "1", "--retry-all-errors"]


def curl(server: Server, answer: Path, body: dict[str, Any], key: str) -> subprocess.Popen[bytes]:
    """Start curl; its answer is in the file when it ends."""
    url, request_args = f"{server.url}/v1/completions", ["-d", json.dumps(body), "-H", "Content-Type: application/json"]
    return subprocess.Popen(
        ["curl", "-sSfN", *RETRY, url, *request_args, "-H", f"Idempotency-Key: {key}", "-o", str(answer)]
    )


def wait_until_generating(server: Server, curl: subprocess.Popen[bytes]) -> None:
    while server.metric("vllm:generation_tokens_total") < 20:
        assert curl.poll() is None, "too fast for this test"
        time.sleep(0.02)


@needs_proc
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize("stream", [False, True])
def test_curl_retry_resumes_answer_with_idempotency_key_after_kills(stream: bool, tmp_path: Path) -> None:
    """The request has no seed, so another answer would be another text."""
    long = ["--max-model-len", "2048"]  # otherwise an answer may end before the kill on a busy machine
    flags = [*SMALL, *long, "--data-dir", str(tmp_path / "data")]
    body = BODY | {"stream": stream}
    first, second, seeded = (tmp_path / name for name in ("first", "second", "seeded"))
    server = Server(tmp_path / "0.log", *flags)
    try:
        interrupted = curl(server, first, body, "key")
        for number in (1, 2):
            wait_until_generating(server, interrupted)
            kill_all(server)
            server = Server(tmp_path / f"{number}.log", *flags, port=server.port)
        assert interrupted.wait(60) == 0
        assert curl(server, second, body, "key").wait(60) == 0
        assert server.metric("quire:streams_resumed_total") >= 2, "neither of the two began anew"
        assert curl(server, seeded, body | {"seed": 1}, "another").wait(60) == 0
    finally:
        kill_all(server)
    assert first.read_bytes() == second.read_bytes()
    assert len(first.read_bytes()) > 1000
    assert first.read_bytes() != seeded.read_bytes()
