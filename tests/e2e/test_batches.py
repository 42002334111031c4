"""A batch survives the deaths of all server processes: each request has one result, the same as without kills."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.server.cli.processes import descendants, needs_proc

SMALL = ["--max-model-len", "512", "--num-kv-blocks", "256", "--max-num-seqs", "8", "--threads", "1"]
ENDED = ("completed", "failed", "expired", "cancelled")


def line(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    words = " ".join(rng.choice(["moon", "tide", "stone", "bird", "lamp"]) for _ in range(rng.randrange(1, 30)))
    body: dict[str, Any] = {"model": "quire-demo", "seed": number, "max_tokens": rng.randrange(8, 60)}
    body |= {"messages": [{"role": "user", "content": words}], "temperature": rng.choice([0, 1])}
    if number % 7 == 3:
        body["n"] = 2
    if number % 5 == 4:
        body |= {"logprobs": True, "top_logprobs": 2}
    if number % 11 == 5:
        body["response_format"] = {"type": "json_object"}
    if number % 13 == 6:
        body["temperature"] = "hot"
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def begin(url: str, count: int) -> str:
    """Create a batch of `count` lines; return its id."""
    content = "\n".join(json.dumps(line(number)) for number in range(count))
    file = httpx.post(f"{url}/v1/files", files={"file": ("in.jsonl", content), "purpose": (None, "batch")}).json()
    batch = httpx.post(
        f"{url}/v1/batches", json={"input_file_id": file["id"], "endpoint": "/v1/chat/completions"}
    ).json()
    return str(batch["id"])


def state(url: str, id: str) -> dict[str, Any]:
    with httpx.Client(transport=httpx.HTTPTransport(retries=3)) as http:  # the asked process may be ending
        batch: dict[str, Any] = http.get(f"{url}/v1/batches/{id}").json()
    return batch


def results(url: str, id: str) -> dict[str, Any]:
    """Wait until the batch has completed; return each line's choices or error by custom_id, which must occur once."""
    deadline = time.monotonic() + 240
    while (batch := state(url, id))["status"] not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
    assert batch["status"] == "completed"
    results_by_id: dict[str, Any] = {}
    for file in filter(None, (batch["output_file_id"], batch["error_file_id"])):
        for each in httpx.get(f"{url}/v1/files/{file}/content").text.splitlines():
            result = json.loads(each)
            assert result["custom_id"] not in results_by_id
            body = result["response"]["body"]
            results_by_id[result["custom_id"]] = body.get("choices") or body["error"]["param"]
    return results_by_id


def kill_all(server: Server) -> None:
    """Kill all processes at once, as a power loss would."""
    family = [server.process.pid, *descendants(server.process.pid)]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    server.process.wait()


@needs_proc
@pytest.mark.parametrize(("count", "kills"), [(120, 3), (2000, 6)])
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_batch_has_one_unchanged_result_per_line_after_process_kills(count: int, kills: int, tmp_path: Path) -> None:
    rng = random.Random(count)
    flags = [*SMALL, "--data-dir"]
    with Server(tmp_path / "whole.log", *flags, str(tmp_path / "whole")) as whole:
        started = time.monotonic()
        expected = results(whole.url, begin(whole.url, count))
        took = time.monotonic() - started
    assert len(expected) == count
    id = ""
    for number in range(kills + 1):
        server = Server(tmp_path / f"cut{number}.log", *flags, str(tmp_path / "cut"), "--api-server-count", "2")
        try:
            id = id or begin(server.url, count)
            if number == kills:
                assert results(server.url, id) == expected
            else:
                time.sleep(rng.uniform(0.2, 1) * took / (kills + 1) / 2)
                os.kill(rng.choice(server.api_pids()), signal.SIGKILL)  # may be the process that runs the batch
                time.sleep(rng.uniform(0.2, 1) * took / (kills + 1) / 2)
                assert state(server.url, id)["status"] in ("validating", "in_progress", "finalizing", "completed")
        finally:
            kill_all(server)
