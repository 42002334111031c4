"""What a call holds of its body is freed when the call ends: no reference cycle keeps it until a garbage collection,
which is rare here.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.server.generation.resolved_request import GenerationRequest
from tests.server.api import NAME
from tests.server.fake import FakeEngine, hashed, scripted
from tests.server.hosted import idle, serving
from tests.server.resolve.test_tool_requests import HERMES

ASKED = {"messages": [{"role": "user", "content": "Hi"}]}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": ASKED,
    "/v1/messages": {**ASKED, "max_tokens": 9},
    "/v1/responses": {"input": "Hi"},
}


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def count_generation_requests() -> int:
    return sum(type(each) is GenerationRequest for each in gc.get_objects())


@pytest.mark.usefixtures("uncollected")
@pytest.mark.few(2)
@pytest.mark.parametrize("path", PATHS)
async def test_finished_call_is_freed_without_garbage_collection(path: str, tmp_path: Path) -> None:
    ways = [{"stream": True}, {"stream": False}, {"stream": False, "padding": "x" * 5000}]
    if path == "/v1/responses":
        ways += [{"background": True}, {"background": True, "stream": True}]
    engine = FakeEngine(scripted(b"Hello", 258), eos=[258], max_model_len=4096)
    async with (
        serving(engine, chat_template=HERMES, data_dir=tmp_path) as port,
        httpx.AsyncClient(base_url=port.url, timeout=30) as http,
    ):
        before = count_generation_requests()
        for way in ways:
            answer = await http.post(path, json={"model": NAME, **PATHS[path], **way})
            assert answer.is_success, answer.text
            await wait_until_freed(before)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.few(2)
@pytest.mark.parametrize("path", PATHS)
async def test_disconnected_call_is_freed_without_garbage_collection(path: str) -> None:
    engine = FakeEngine(hashed(b"ab"), max_model_len=4096, step_seconds=0.01)
    async with serving(engine, chat_template=HERMES) as port:
        before = count_generation_requests()
        body = {"model": NAME, **PATHS[path], "stream": True}
        async with (
            httpx.AsyncClient(base_url=port.url, timeout=30) as http,
            http.stream("POST", path, json=body) as answer,
        ):
            await anext(answer.aiter_raw())
        await idle(engine)
        await wait_until_freed(before)


async def wait_until_freed(before: int) -> None:
    async with asyncio.timeout(10):
        while count_generation_requests() > before:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
