"""Section of the data on disk: the base writes a data folder and is killed, then base or head continues with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.server import Server
from tests.golden.masks import mask
from tests.golden.models import Captured
from tests.golden.requests import MODEL
from tests.golden.serving import served
from tests.golden.tree import Tree

_STORIES = ("A fox and a crow", "The king had three", "In the forest", "Little Hans")
_LONG_PROMPT = "There was once a miller who had a daughter, and she was clever and kind to every animal. " * 8
_SECONDS = 120


class Writer:
    """What the base stored before it was killed, and the streams that were cut off."""

    def __init__(self) -> None:
        self.responses: list[str] = []
        self.conversation = ""
        self.file = ""
        self.batch = ""
        self.background = ""
        self.streams: list[tuple[str, str, str]] = []
        """Id, the last event's id, and what had come of each."""


def write_data(tree: Tree, folder: Path) -> Writer:
    """Fill a data folder, and kill the server in the middle of four streams, a batch and a background response."""
    writer = Writer()
    with served(tree, folder / "base.log", *_arguments(folder)) as server:
        with httpx.Client(base_url=server.url, timeout=_SECONDS) as client:
            _store_objects(client, writer)
            _cut_streams(server, client, writer)
        os.kill(server.process.pid, signal.SIGKILL)
        for pid in server.engine_pids():
            os.kill(pid, signal.SIGKILL)
        server.process.wait(_SECONDS)
    return writer


def capture_disk(tree: Tree, written: Path, work: Path, writer: Writer) -> Captured:
    """What a server of `tree` says of a copy of the folder that the base wrote."""
    shutil.copytree(written, work, dirs_exist_ok=True)
    texts: Captured = {}
    with served(tree, work / "reader.log", *_arguments(work)) as server:
        replacements = {str(work): "WORK", str(server.port): "PORT"}
        with httpx.Client(base_url=server.url, timeout=_SECONDS) as client:
            for name, text in _read_objects(client, writer):
                texts[name] = mask(text, replacements)
            answer = client.post("/v1/completions", json=_completion(_LONG_PROMPT, 4)).json()
            texts["tokens of a prefix that a KV tier on disk has"] = json.dumps(
                {"text": answer["choices"][0]["text"], "cached": answer["usage"]["prompt_tokens_details"]}
            )
    receipts = tree.run(["-m", "quire", "replay", str(written / "receipts.jsonl"), "--json", "--threads", "1"])
    verdicts = [json.loads(line)["outcome"] for line in receipts.stdout.splitlines()]
    texts["receipts of the base"] = f"{verdicts}\nexit status {receipts.returncode}"
    return texts


def _arguments(folder: Path) -> list[str]:
    """Settings of `quire serve` that keep all they can in the folder."""
    return [
        *("--data-dir", str(folder / "data")),
        *("--kv-offload-dir", str(folder / "kv")),
        *("--receipt-log", str(folder / "receipts.jsonl")),
        *("--max-model-len", "1024"),
    ]


def _completion(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def _store_objects(client: httpx.Client, writer: Writer) -> None:
    for story in _STORIES:
        body = {"model": MODEL, "input": story, "max_output_tokens": 12, "temperature": 0, "store": True}
        writer.responses.append(client.post("/v1/responses", json=body).json()["id"])
    item = {"type": "message", "role": "user", "content": "Who lives by the brook?"}
    writer.conversation = client.post("/v1/conversations", json={"items": [item]}).json()["id"]
    client.post("/v1/completions", json=_completion(_LONG_PROMPT, 4)).raise_for_status()
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": _completion(story, 40, seed=number),
        }
        for number, story in enumerate(_STORIES * 4)
    ]
    content = "\n".join(json.dumps(line) for line in lines)
    upload = client.post("/v1/files", files={"file": ("batch.jsonl", content)}, data={"purpose": "batch"})
    writer.file = upload.json()["id"]
    # Long enough for the copy of a prefix to reach the tier on disk.
    time.sleep(2)


def _cut_streams(server: Server, client: httpx.Client, writer: Writer) -> None:
    batch = {"input_file_id": writer.file, "endpoint": "/v1/completions", "completion_window": "24h"}
    writer.batch = client.post("/v1/batches", json=batch).json()["id"]
    body = {"model": MODEL, "input": "A long tale", "max_output_tokens": 300, "background": True, "temperature": 0}
    writer.background = client.post("/v1/responses", json=body).json()["id"]
    for number, story in enumerate(_STORIES):
        request = _completion(story, 300, stream=True, seed=number)
        with client.stream("POST", "/v1/completions", json=request) as response:
            text, last = "", ""
            for line in response.iter_lines():
                if line.startswith("id: "):
                    last = line.removeprefix("id: ")
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if len(text) > 20:
                    break
            writer.streams.append((response.headers["x-stream-id"], last, text))


def _read_objects(client: httpx.Client, writer: Writer) -> Iterator[tuple[str, str]]:
    for number, (stream, last, _) in enumerate(writer.streams):
        resumed = client.get(f"/v1/streams/{stream}", headers={"Last-Event-ID": last})
        yield f"stream {number}, resumed", f"{resumed.status_code}\n{resumed.text}"
    for number, response in enumerate(writer.responses):
        yield f"response {number}", client.get(f"/v1/responses/{response}").text
    yield "conversation", client.get(f"/v1/conversations/{writer.conversation}/items").text
    yield "file", client.get(f"/v1/files/{writer.file}/content").text
    yield "background response", _wait(client, f"/v1/responses/{writer.background}")
    batch = json.loads(_wait(client, f"/v1/batches/{writer.batch}"))
    yield "batch", json.dumps(batch["request_counts"])
    output = client.get(f"/v1/files/{batch['output_file_id']}/content").text
    yield "output of the batch", "\n".join(sorted(output.splitlines(), key=_custom_id))


def _custom_id(line: str) -> str:
    return str(json.loads(line)["custom_id"])


def _wait(client: httpx.Client, path: str) -> str:
    """The object, once it has ended."""
    deadline = time.monotonic() + _SECONDS
    while True:
        text = client.get(path).text
        if json.loads(text)["status"] in {"completed", "failed", "incomplete", "expired", "cancelled"}:
            return text
        if time.monotonic() > deadline:
            return f"it had not ended after {_SECONDS} s: {text}"
        time.sleep(0.2)
