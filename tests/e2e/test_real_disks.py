"""On a full disk accepted work waits, callers get errors, nothing is lost, and work continues when there is room."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server
from tests.e2e.test_batches import SMALL, begin, kill_all, results, state
from tests.server.cli.processes import needs_proc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), needs_proc]
LINES = 60
LONG = {"model": "quire-demo", "max_tokens": 400, "ignore_eos": True, "temperature": 1, "stream": True}
CONVERSATION = {"items": [{"type": "message", "role": "user", "content": "x" * 20_000}]}
"""Takes room each time that it is stored."""


@dataclass(frozen=True)
class Disk:
    folder: Path
    fail: Callable[[], None]
    """Fill the disk."""
    mend: Callable[[], None]


def run(*command: str | Path) -> None:
    """Skip the test if the machine does not allow the command."""
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{command[0]}: {getattr(error, 'stderr', b'').decode().strip() or error}")


def tmpfs_disk(folder: Path) -> Disk:
    run("mount", "-t", "tmpfs", "-o", "size=16m,mode=700", "tmpfs", folder)
    filler = folder / "filler"

    def fill() -> None:
        with suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    return Disk(folder, fill, filler.unlink)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount")
    (folder := tmp_path / "disk").mkdir()
    try:
        yield tmpfs_disk(folder)
    finally:
        if os.path.ismount(folder):
            subprocess.run(["umount", folder], check=True)


def ids(events: bytes) -> list[str]:
    return re.findall(r"^id: (.*)$", events.decode(), re.MULTILINE)


async def wait_until(what: Callable[[], Any], found: Any = True) -> None:
    async with asyncio.timeout(120):
        while await asyncio.to_thread(what) != found:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_accepted_work_waits_for_full_disk_and_completes_afterwards(disk: Disk, tmp_path: Path) -> None:
    flags = [*SMALL, "--data-dir", str(disk.folder / "data")]
    server = Server(tmp_path / "log", *flags)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:

            async def stream(number: int) -> tuple[str, bytes]:
                async with http.stream("POST", "/v1/completions", json=LONG | {"prompt": f"{number}"}) as answer:
                    assert answer.status_code == 200, await answer.aread()
                    return answer.headers.get("x-stream-id", ""), b"".join([each async for each in answer.aiter_raw()])

            batch = await asyncio.to_thread(begin, server.url, LINES)
            background = {"model": "quire-demo", "input": "Once", "max_output_tokens": 400, "background": True}
            response = (await http.post("/v1/responses", json=background)).json()["id"]
            reading = [asyncio.create_task(stream(number)) for number in range(4)]
            await wait_until(lambda: state(server.url, batch)["request_counts"]["completed"] > 3)
            disk.fail()
            async with asyncio.timeout(60):
                while (conversation := await http.post("/v1/conversations", json=CONVERSATION)).status_code == 200:
                    pass
            assert (conversation.status_code, conversation.json()["error"]["param"]) == (503, "data_dir")
            await wait_until(lambda: b"Nothing can be saved now" in server.get("/health").content)
            assert server.metric("quire:data_dir_refuses") == 1
            form = {"file": ("in.jsonl", b"x" * 1_000_000), "purpose": (None, "batch")}
            uploaded = await http.post("/v1/files", files=form)
            assert (uploaded.status_code, uploaded.json()["error"]["param"]) == (503, "data_dir")
            streams = await asyncio.gather(*reading)
            assert all(events.endswith(b"data: [DONE]\n\n") for _, events in streams)
            assert (await stream(9))[1].endswith(b"data: [DONE]\n\n"), "others are answered"
            waiting = await asyncio.to_thread(state, server.url, batch)
            assert waiting["status"] == "in_progress"
            await asyncio.sleep(6)
            assert (await asyncio.to_thread(state, server.url, batch))["status"] == "in_progress"
            disk.mend()
            await wait_until(lambda: server.metric("quire:data_dir_refuses"), 0)
            await wait_until(lambda: b"data_dir" in server.get("/health").content, False)
            assert len(await asyncio.to_thread(results, server.url, batch)) == LINES
            async with asyncio.timeout(60):
                while (told := (await http.get(f"/v1/responses/{response}")).json())["status"] == "in_progress":  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
            assert told["status"] in ("completed", "incomplete")
            for id, events in streams:
                assert (await http.get(f"/v1/streams/{id}")).content == events
                half = ids(events)[200]
                rest = await http.get(f"/v1/streams/{id}", headers={"Last-Event-ID": half})
                assert events.endswith(rest.content)
            known = {each["id"] for each in (await http.get("/v1/files")).json()["data"]}
            assert {each.name for each in (disk.folder / "data" / "files").iterdir()} == known, "nothing is left behind"
    finally:
        kill_all(server)
