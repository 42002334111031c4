"""litellm's files and batches while the server is killed during the batch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import litellm
import pytest

from tests.e2e.server import Server

COUNT = 200


class RestartableServer:
    """A server that can be killed and restarted at the same port with the same folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.server = self._start(None)

    def _start(self, port: int | None) -> Server:
        flags = ["--data-dir", str(self._folder / "data"), "--threads", "1", "--max-num-seqs", "8"]
        return Server(self._folder / "log", *flags, quire=Path(os.environ["QUIRE"]), port=port)

    def again(self) -> None:
        self.server.process.kill()
        self.server.process.wait()
        self.server = self._start(self.server.port)


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[RestartableServer]:
    restartable = RestartableServer(tmp_path)
    yield restartable
    restartable.server.stop()


def line(number: int) -> dict[str, Any]:
    body = {"seed": number, "max_tokens": 30, "messages": [{"role": "user", "content": f"Number {number}"}]}
    body["model"] = "quire-demo"
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_batch_completes_after_server_kills(killed: RestartableServer, provider: str) -> None:
    provider_options: dict[str, Any] = {
        "custom_llm_provider": provider,
        "api_base": f"{killed.server.url}/v1",
        "api_key": "none",
    }
    content = "\n".join(json.dumps(line(number)) for number in range(COUNT)).encode()
    file = litellm.create_file(file=("in.jsonl", content), purpose="batch", **provider_options)
    batch_options = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "input_file_id": file.id}
    batch = litellm.create_batch(**batch_options, metadata={"a": "b"}, **provider_options)
    deadline, deaths = monotonic() + 240, 0
    while (batch_state := litellm.retrieve_batch(batch_id=batch.id, **provider_options)).status != "completed":
        assert monotonic() < deadline, batch_state
        if deaths < 2 and batch_state.request_counts.completed > 40 * deaths:
            deaths += 1
            killed.again()
        sleep(0.1)
    assert deaths == 2, "too fast for this test"
    assert (batch_state.request_counts.completed, batch_state.metadata) == (COUNT, {"a": "b"})
    results = litellm.file_content(file_id=batch_state.output_file_id, **provider_options).content.decode().splitlines()
    assert [json.loads(each)["custom_id"] for each in results] == [f"r{number}" for number in range(COUNT)]
    assert batch.id in [each.id for each in litellm.list_batches(**provider_options).data]
    second = litellm.create_batch(**batch_options, **provider_options)
    assert litellm.cancel_batch(batch_id=second.id, **provider_options).status in ("cancelling", "cancelled")
    assert litellm.file_delete(file_id=file.id, **provider_options).deleted
