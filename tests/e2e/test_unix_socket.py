"""`quire serve --uds`, with one API process and with several."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from quire.server.cli.chat import open_client_or_start_server
from quire.server.config import ServerConfig
from tests.e2e.server import children

SMALL = ("--num-kv-blocks", "256", "--max-model-len", "2048", "--max-num-seqs", "8", "--threads", "1")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.mark.parametrize("count", [1, 2])
def test_server_answers_and_drains_on_unix_socket(count: int, tmp_path: Path) -> None:
    """The curl line works, the socket survives the end of an API process, and SIGTERM finishes a stream and removes the
    file.
    """
    path = "quire.sock"
    argv = [sys.executable, "-m", "quire", "serve", "--uds", path, "--api-server-count", str(count), *SMALL]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    socket_path = tmp_path / path

    def connect() -> httpx.Client:
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket_path)), base_url="http://localhost", timeout=60
        )

    try:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith("curl"):
                break
        assert any(line.startswith(f"  ready      {path} after ") for line in printed), printed
        curl = subprocess.run(
            shlex.split(printed[-1]), cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )
        assert curl.stdout.rstrip().endswith("data: [DONE]")
        with open_client_or_start_server(f"unix:{socket_path}", ServerConfig(), None, None) as http:
            assert http.get("models").status_code == 200, "`quire chat --url unix:…`"
        for pid in children(process.pid, b"api_process")[:1] if count > 1 else ():
            os.kill(pid, signal.SIGKILL)
            for _ in range(10):
                with connect() as http:
                    assert http.get("/health").status_code == 200
                time.sleep(0.1)
        body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with connect() as http, http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(60) == 0
        assert not socket_path.exists()
    finally:
        process.kill()
        process.communicate()
