"""examples/rl/send_weights.py against a real server, and the shared memory left when the server is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.common.config import DEMO_MODEL
from tests.e2e.server import Server
from tests.tree import ROOT

BODY = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
FILE = "model.safetensors"


@pytest.mark.slow
def test_sent_weights_are_used_and_freed_after_server_kill(tmp_path: Path) -> None:
    torch.manual_seed(0)
    other = tmp_path / "other"
    other.mkdir()
    save_file(
        {name: each + torch.randn_like(each) for name, each in load_file(Path(DEMO_MODEL) / FILE).items()}, other / FILE
    )
    already = _received()
    with Server(tmp_path / "log", "--dtype", "float32", "--threads", "1") as server:
        before = httpx.post(f"{server.url}/v1/completions", json=BODY).json()
        command = [
            sys.executable,
            str(ROOT / "examples/rl/send_weights.py"),
            server.url,
            str(other),
            "--version",
            "other",
        ]
        subprocess.run(command, check=True, timeout=300)
        after = httpx.post(f"{server.url}/v1/completions", json=BODY).json()
        assert (before["weights_version"], after["weights_version"]) == ("1", "other")
        assert before["choices"][0]["text"] != after["choices"][0]["text"]
        received = _received() - already
        assert received
    while any(file.exists() for file in received):  # bounded by pytest's timeout
        time.sleep(0.05)


def _received() -> set[Path]:
    return {*Path("/dev/shm").glob("quire-weights-*/*/model-00001.safetensors")}
