"""The application runs in an ASGI server other than `quire serve`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from quire.engine.common.errors import ConfigError
from quire.server.asgi import create_app
from tests.e2e.server import free_port

pytestmark = pytest.mark.slow


def test_uvicorn_serves_create_app_factory() -> None:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--factory", "quire.server.asgi:create_app", "--port", str(port)]
    env = os.environ | {"QUIRE_NUM_KV_BLOCKS": "64", "QUIRE_SERVED_MODEL_NAME": "tales"}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline
            try:
                body = {"model": "tales", "prompt": "Once", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
                answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
                break
            except httpx.ConnectError:
                time.sleep(0.2)
        assert answer.json()["usage"]["completion_tokens"] == 5
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM)
    finally:
        process.kill()


def test_create_app_rejects_several_api_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_SERVER_COUNT", "2")
    with pytest.raises(ConfigError, match="api_server_count: works only with `quire serve`"):
        create_app()
