"""Several models behind one app, on fake engines: which model serves a request, what the request's body costs
meanwhile, what all models share.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.client.engine_client import EngineClient
from quire.engine.common.errors import ModelError
from quire.server.access.tenants import Tenants
from quire.server.config import ServerConfig
from quire.server.multi_model.added_models import AddedModels
from quire.server.multi_model.model_manager import ModelManager
from quire.server.multi_model.models_config import ModelEntry, ModelsConfig, ModelsFileOptions
from quire.server.multi_model.multi_model_app import create_multi_model_app
from quire.server.runtime import server_startup
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.model_startup import open_runtime
from quire.server.runtime.server_context import ServerContext
from quire.server.served_model import ServedModelSpec
from tests.server.api import VOCAB_SIZE, open_http
from tests.server.fake import FakeEngine, scripted
from tests.server.forked import FORKED
from tests.texts import CHATML, byte_level_tokenizer

KIB = 1024
BODY = 200 * KIB
NEVER = "never"
"""The name of a model whose load does not end."""
WRONG = "wrong"
"""The name of a model whose files are invalid."""


@asynccontextmanager
async def open_fake_model(over: asyncio.Event, entry: ModelEntry) -> AsyncIterator[ModelRuntime]:
    """A model that writes its own name, again and again. `over` is set when the test ends."""
    if entry.name == NEVER:
        await over.wait()
    if entry.name == WRONG:
        raise ModelError("model: wrong has no config.json")
    tokenizer = byte_level_tokenizer(CHATML).tokenizer
    source = ServedModelSpec(entry.config, tokenizer, VOCAB_SIZE, {})
    engine = FakeEngine(scripted(entry.name.encode() * 500, 0), step_seconds=0.001)
    async with open_runtime(
        source, None, EngineClient(engine), has_api_keys=False, folder=None, launch_process=FORKED
    ) as runtime:
        yield runtime


@asynccontextmanager
async def open_multi_model_app(*names: str, **options: Any) -> AsyncIterator[tuple[ServerContext, httpx.AsyncClient]]:
    """A server of these models; the first one is loaded."""
    config = ServerConfig(max_body_size=1 / 4, **options)
    entries = tuple(ModelEntry(name, config.model_copy(update={"served_model_name": [name]}), 0.0, 1) for name in names)
    over = asyncio.Event()
    settings = ModelsConfig(entries, None, 1.0, ModelsFileOptions(), {})
    app = create_multi_model_app(
        ModelManager(settings, partial(open_fake_model, over)),
        settings,
        AddedModels(settings, None),
        config,
        Tenants(config),
    )
    async with open_http(app) as http:
        try:
            yield app.state.server, http
        finally:
            over.set()


async def test_startup_error_names_failing_model() -> None:
    with pytest.raises(ModelError, match=f"models: {WRONG}: model: wrong has"):
        async with open_multi_model_app(WRONG):
            pass


def body(model: str | None, **more: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 3, **more} | ({} if model is None else {"model": model})


async def states(http: httpx.AsyncClient) -> dict[str, str]:
    return {card["id"]: card["state"] for card in (await http.get("/v1/models")).json()["data"]}


async def test_request_is_routed_to_named_model() -> None:
    async with open_multi_model_app("abc", "def") as (server, http):
        for query, requested_model, expected_model in (
            ("", "def", "def"),
            ("?model=def", None, "def"),
            ("", None, "abc"),
        ):
            answer = (await http.post(f"/v1/completions{query}", json=body(requested_model))).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (expected_model, expected_model)
        lost = await http.post("/v1/completions", json=body("none"), headers={"X-Request-Id": "mine"})
        assert (lost.status_code, lost.json()["error"]["code"]) == (404, "model_not_found")
        assert lost.headers["X-Request-Id"] == "mine"
        assert (await http.get("/v1/models/def")).json()["id"] == "def"
        assert server.body_reader.reserved_bytes == 0


async def test_each_event_of_a_websocket_is_routed_to_its_model() -> None:
    """Runs on an ASGI server that knows nothing of Quire."""
    async with open_multi_model_app("abc", "def") as (_, http):
        sent: asyncio.Queue[Any] = asyncio.Queue()
        received: asyncio.Queue[Any] = asyncio.Queue()
        path = "/v1/responses"
        scope = {"type": "websocket", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "ws", "path": path}
        scope |= {"raw_path": path.encode(), "query_string": b"model=def", "root_path": "", "subprotocols": []}
        scope |= {"headers": [(b"host", b"quire")], "client": ("127.0.0.1", 1), "server": ("quire", 80)}
        app: Any = http._transport
        serving = asyncio.create_task(app.app(scope, sent.get, received.put))
        sent.put_nowait({"type": "websocket.connect"})
        assert (await received.get())["type"] == "websocket.accept"
        for more, expected in (({"model": "abc"}, "abc"), ({}, "def"), ({"model": "none"}, "model_not_found")):
            event = {"type": "response.create", "input": "x", "max_output_tokens": 3, **more}
            sent.put_nowait({"type": "websocket.receive", "text": json.dumps(event)})
            while "response.incomplete" not in (text := (await received.get())["text"]) and '"error"' not in text[:20]:
                pass
            answer = json.loads(text)
            got = answer["error"]["code"] if answer["type"] == "error" else answer["response"]["model"]
            assert got == expected
        sent.put_nowait({"type": "websocket.disconnect", "code": 1000})
        await serving


async def test_request_body_counts_against_budget_while_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_startup, "BODY_BUDGET_BYTES", 2 * 256 * KIB)  # two of the bodies fill it
    async with open_multi_model_app("a", NEVER) as (server, http):
        large = body(NEVER, user="u" * BODY)
        posts = [asyncio.create_task(http.post("/v1/completions", json=large)) for _ in range(5)]
        async with asyncio.timeout(10):
            while server.body_reader.reserved_bytes < 2 * BODY:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for _ in range(20):
                await asyncio.sleep(0)
            assert 2 * BODY < server.body_reader.reserved_bytes < 3 * BODY
            for post in posts:
                post.cancel()
            await asyncio.gather(*posts, return_exceptions=True)
        assert server.body_reader.reserved_bytes == 0
        assert (await http.post("/v1/completions", json=body("a", user="u" * 2 * BODY))).status_code == 413


async def test_stored_responses_and_conversations_are_shared_by_models(tmp_path: Path) -> None:
    async with open_multi_model_app("abc", "def", data_dir=tmp_path) as (server, http):
        conversation = (await http.post("/v1/conversations", json={"metadata": {"k": "u"}})).json()
        request = {"model": "def", "input": "x", "max_output_tokens": 3, "conversation": conversation["id"]}
        response = (await http.post("/v1/responses", json=request)).json()
        after = (await http.post("/v1/responses", json=request | {"model": "abc"})).json()
        texts = [each["output"][0]["content"][0]["text"] for each in (response, after)]
        assert texts == ["def", "abc"]
        items = (await http.get(f"/v1/conversations/{conversation['id']}/items")).json()["data"]
        assert len(items) == 4, "the second model read what the first had written"
        assert (await http.post("/v1/models/unload", json={"model": "abc"})).json()["state"] == "unloaded"
        assert (await http.get(f"/v1/responses/{after['id']}")).json()["model"] == "abc"
        changed = await http.post(f"/v1/conversations/{conversation['id']}", json={"metadata": {"k": "v" * 500}})
        assert changed.json()["metadata"] == {"k": "v" * 500}
        lost = await http.post("/v1/conversations/conv_none", json={"metadata": {"k": "v"}})
        assert lost.status_code == 404
        assert await states(http) == {"abc": "unloaded", "def": "awake"}
        assert server.body_reader.reserved_bytes == 0


async def ended(http: httpx.AsyncClient, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Create a batch of these lines, and return it when it is completed."""
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", content)})
    batch_body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch: dict[str, Any] = (await http.post("/v1/batches", json=batch_body)).json()
    async with asyncio.timeout(20):
        while batch["status"] != "completed":
            await asyncio.sleep(0.01)
            batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
    return batch


async def test_batch_routes_lines_to_several_models(tmp_path: Path) -> None:
    async with open_multi_model_app("abc", "def", data_dir=tmp_path) as (_, http):
        lines = [
            {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body(name)}
            for name in ("abc", "def", "none")
        ]
        batch = await ended(http, lines)
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        output = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text.splitlines()
        texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in map(json.loads, output)}
        assert texts == {"abc": "abc", "def": "def"}


async def test_resumed_stream_continues_with_same_model(tmp_path: Path) -> None:
    async with open_multi_model_app("abc", "def", data_dir=tmp_path) as (_, http):
        request = body(None, max_tokens=30, stream=True, seed=1)
        whole = await http.post("/v1/completions?model=def", json=request)
        id = whole.headers["X-Stream-Id"]
        again = await http.get(f"/v1/streams/{id}")
        assert again.text == whole.text
        last = [line for line in whole.text.splitlines() if line.startswith("id: ")][-3].removeprefix("id: ")
        rest = await http.get(f"/v1/streams/{id}", headers={"Last-Event-ID": last})
        assert whole.text.endswith(rest.text)
        assert 0 < len(rest.text) < len(whole.text)


async def test_explain_and_cancel_find_request_of_any_model() -> None:
    async with open_multi_model_app("abc", "def") as (server, http):
        await http.post("/v1/completions", json=body("def"), headers={"X-Request-Id": "one"})
        assert (await http.get("/v1/requests/one/explain")).json()["model"] == "def"
        long = body("def", max_tokens=400)
        post = asyncio.create_task(http.post("/v1/completions", json=long, headers={"X-Request-Id": "two"}))
        async with asyncio.timeout(10):
            while not server.models.loaded_runtimes[1].client.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert (await http.delete("/v1/requests/cmpl-two")).json()["cancelled"]
        assert (await post).json()["choices"][0]["finish_reason"] == "abort"
        assert (await http.delete("/v1/requests/cmpl-two")).status_code == 404


async def test_cache_diagnostics_compare_answers_of_several_models() -> None:
    async with open_multi_model_app("abc", "def") as (_, http):
        sent = {"model": "abc", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello, hello"}]}
        first = (await http.post("/v1/messages", json={**sent, "diagnostics": {}})).json()
        compared = {**sent, "model": "def", "diagnostics": {"previous_message_id": first["id"]}}
        answer = (await http.post("/v1/messages", json=compared)).json()
        assert answer["diagnostics"]["cache_miss_reason"]["type"] == "model_changed"


async def test_metrics_are_labeled_by_model(tmp_path: Path) -> None:
    async with open_multi_model_app("abc", "def", data_dir=tmp_path) as (_, http):
        await http.post("/v1/completions", json=body("def"))
        families = list(text_string_to_metric_families((await http.get("/metrics")).text))
        assert len({family.name for family in families}) == len(families)
        samples = [each for family in families for each in family.samples]
        kinds = [(each.name, *sorted(each.labels.items())) for each in samples]
        assert len(set(kinds)) == len(kinds), "each series is there once"
        counts = {
            each.labels["model_name"]: each.value for each in samples if each.name == "vllm:request_params_n_count"
        }
        assert counts == {"abc": 0.0, "def": 1.0}
        assert {each.labels["model_name"] for each in samples if each.name == "quire:ranks"} == {"abc", "def"}


async def test_ollama_api_lists_and_serves_every_model() -> None:
    async with open_multi_model_app("abc", "def") as (_, http):
        tags = (await http.get("/api/tags")).json()["models"]
        assert [each["model"] for each in tags] == ["abc", "def"]
        assert all(len(each["digest"]) >= 12 for each in tags), "Ollama's own client shows so many characters"
        assert [each["model"] for each in (await http.get("/api/ps")).json()["models"]] == ["abc"]
        details = await http.post("/api/show", json={"name": "def"})
        assert details.json()["model_info"]["general.basename"] == "def"
        request = {"model": "def:latest", "prompt": "x", "stream": False, "options": {"num_predict": 3}}
        assert (await http.post("/api/generate", json=request)).json()["response"] == "def"
        assert [each["model"] for each in (await http.get("/api/ps")).json()["models"]] == ["abc", "def"]


async def test_empty_model_name_is_the_first_model() -> None:
    """As in vLLM; llama.vim sends it."""
    async with open_multi_model_app("abc", "def") as (_, http):
        answer = await http.post("/v1/completions", json=body(""))
        assert (answer.status_code, answer.json()["model"]) == (200, "abc")


async def test_batch_fails_lines_of_unloadable_model_without_waiting(tmp_path: Path) -> None:
    async with open_multi_model_app("abc", WRONG, data_dir=tmp_path) as (_, http):
        answer = await http.post("/v1/completions", json=body(WRONG))
        assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")
        lines = [
            {"custom_id": str(place), "method": "POST", "url": "/v1/completions", "body": body(name)}
            for place, name in enumerate((*[WRONG] * 8, "abc"))
        ]
        assert (await ended(http, lines))["request_counts"] == {"total": 9, "completed": 1, "failed": 8}
