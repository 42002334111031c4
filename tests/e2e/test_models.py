"""`quire serve --models` with three models in memory for two, on a real server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.engine.common.config import DEMO_MODEL
from quire.server.multi_model.added_models import AddedModels
from quire.server.multi_model.models_config import read_models_file
from tests.e2e.server import Server
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.slow

NAMES = ("stories", "double", "tiny")
LONG, LONGER = 300, 1900


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    tiny = save_tiny_model(folder / "tiny", "llama", max_position_embeddings=1024)
    file = folder / "models.toml"
    file.write_text(f"""
memory = 0.85
slice_seconds = 0.3
[stories]
model = "{DEMO_MODEL}"
[double]
model = "{DEMO_MODEL}"
dtype = "float32"
served_model_name = ["twice"]
[tiny]
model = "{tiny}"
skip_tokenizer_init = true
sleep_level = 2
[huge]
model = "{DEMO_MODEL}"
kv_cache_memory = 2
[gone]
model = "{folder / "gone"}"
""")
    slow = folder / "keys.toml"
    slow.write_text('[slow]\nkey = "slow"\nrequests_per_minute = 2\n')
    flags = ("--threads=1", "--kv-cache-memory=0.1", f"--data-dir={folder / 'data'}", "--shutdown-timeout=5")
    keys = ("--api-key", "key", "--admin-api-key", "admin", "--api-key-file", str(slow))
    server = Server(folder / "log", "--models", str(file), *flags, *keys)
    yield server
    assert server.stop() == 0, server.log.read_text()


def client(server: Server, key: str = "admin") -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=120)


def body(name: str, seed: int = 0, tokens: int = 8) -> dict[str, Any]:
    fields = {"model": name, "prompt": [5, 6, 7 + seed], "max_tokens": tokens, "seed": seed, "ignore_eos": True}
    return fields | {"return_token_ids": True}


async def complete_token_ids(http: httpx.AsyncClient, name: str, seed: int = 0, tokens: int = 8) -> list[int]:
    answer = await http.post("/v1/completions", json=body(name, seed, tokens))
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    token_ids = answer.json()["choices"][0]["token_ids"]
    assert len(token_ids) == tokens
    return list(token_ids)


async def model_states(http: httpx.AsyncClient) -> dict[str, str]:
    return {card["id"]: card["state"] for card in (await http.get("/v1/models")).json()["data"]}


async def test_models_load_on_request_and_at_most_two_are_awake(server: Server) -> None:
    async with client(server) as http, client(server, "wrong") as stranger:
        assert (await stranger.post("/v1/completions", json=body("double"))).status_code == 401
        assert await model_states(http) == {
            "stories": "awake",
            "double": "unloaded",
            "twice": "unloaded",
            "tiny": "unloaded",
            "huge": "unloaded",
            "gone": "unloaded",
        }
        for name in (*NAMES, *NAMES, "twice"):
            await complete_token_ids(http, name)
            now = await model_states(http)
            assert now[name] == "awake"
            assert sum(now[name] == "awake" for name in NAMES) <= 2
        gone = await http.post("/v1/completions", json=body("gone"))
        assert (gone.status_code, "cannot be loaded" in gone.text) == (503, True)
        huge = await http.post("/v1/completions", json=body("huge"))
        assert (huge.status_code, "needs 2.26 GiB while awake" in huge.text) == (503, True), huge.text
        assert sum(state == "awake" for state in (await model_states(http)).values()) > 0  # no model was evicted for it
        error = (await http.post("/v1/completions", json=body("none"))).json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert (await http.post("/v1/completions", content=b"{")).status_code == 400
        assert (await http.post("/v1/completions", content=b"[" * (17 * 2**20))).status_code == 413
        assert (await http.post("/v1/nothing", json={})).status_code == 404
        assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).json()["model"] == "stories"


async def test_concurrent_models_generate_same_tokens_as_alone(server: Server) -> None:
    async with client(server) as http:
        requests = [(name, seed) for seed in range(2) for name in NAMES]
        alone = [await complete_token_ids(http, name, seed, LONG) for name, seed in requests]
        assert await asyncio.gather(*[complete_token_ids(http, name, seed, LONG) for name, seed in requests]) == alone


async def test_requests_without_model_name_reach_right_model(server: Server) -> None:
    async with client(server) as http:
        response_body = {"model": "double", "input": "Hello", "max_output_tokens": 16, "store": True}
        response = (await http.post("/v1/responses", json=response_body)).json()
        assert (await http.get(f"/v1/responses/{response['id']}")).json()["id"] == response["id"]
        assert (await http.get("/v1/responses/resp_none")).status_code == 404
        assert (await http.get("/v1/models/tiny")).json()["id"] == "tiny"
        assert (await http.get("/health")).status_code == 200
        families = list(text_string_to_metric_families((await http.get("/metrics")).text))
        assert len({family.name for family in families}) == len(families)
        samples = [each for family in families for each in family.samples if each.name == "vllm:num_requests_running"]
        assert {each.labels["model_name"] for each in samples} >= {"stories", "double"}


async def test_api_key_rate_limit_counts_all_models_together(server: Server) -> None:
    async with client(server, "slow") as http:
        await complete_token_ids(http, "stories")
        await complete_token_ids(http, "tiny")
        for name in NAMES:
            assert (await http.post("/v1/completions", json=body(name))).status_code == 429


async def test_admin_adds_and_forgets_model_at_runtime(server: Server, tmp_path: Path) -> None:
    more = {"model": str(save_tiny_model(tmp_path / "more", "qwen3")), "skip_tokenizer_init": True}
    async with client(server) as http, client(server, "key") as user:

        async def post_json(path: str, given: dict[str, Any]) -> tuple[int, str]:
            answer = await http.post(path, json=given)
            return answer.status_code, answer.text

        assert (await user.post("/v1/models/load", json={"model": "more", "settings": more})).status_code == 403
        for wrong in ({"model": "tiny", "settings": more}, {"model": "more", "settings": {"model": "nowhere/to"}}):
            assert (await post_json("/v1/models/load", wrong))[0] == 400
        assert "more" not in await model_states(http)
        assert await post_json("/v1/models/load", {"model": "more", "settings": more}) == (
            200,
            '{"model":"more","state":"awake"}',
        )
        stored_models = json.loads((server.log.parent / "data" / "models.json").read_bytes())
        assert stored_models == {"more": more}
        assert len(await complete_token_ids(user, "more")) == 8
        assert (await post_json("/v1/models/unload", {"model": "tiny", "forget": True}))[0] == 400
        assert (await post_json("/v1/models/unload", {"model": "more", "forget": True}))[0] == 200
        assert (await user.post("/v1/completions", json=body("more"))).status_code == 404
        assert json.loads((server.log.parent / "data" / "models.json").read_bytes()) == {}


def test_added_models_are_loaded_at_next_start(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(f'[one]\nmodel = "{DEMO_MODEL}"\n')
    fleet = read_models_file(tmp_path / "models.toml", {})
    before = AddedModels(fleet, tmp_path)
    before.add_model("two", {"model": DEMO_MODEL, "num_kv_blocks": 8})
    before.add_model("old", {"model": DEMO_MODEL, "a_setting_of_before": 8})
    after = AddedModels(fleet, tmp_path)
    assert [(entry.name, entry.config.num_kv_blocks) for entry in after.load_entries()] == [("two", 8)]
    assert ("two" in after, "old" in after) == (True, False)
    (tmp_path / "models.json").write_text("[1]")
    assert AddedModels(fleet, tmp_path).load_entries() == []


async def test_admin_sleeps_unloads_and_loads_model(server: Server) -> None:
    async with client(server) as http, client(server, "key") as user:
        await complete_token_ids(http, "double")
        assert (await http.post("/sleep?model=double")).json()["is_sleeping"]
        assert (await model_states(http))["double"] == "sleeping"
        await complete_token_ids(user, "double")
        for path in ("/v1/models/unload", "/v1/models/load", "/sleep?model=double"):
            assert (await user.post(path, json={"model": "double"})).status_code == 403
        assert (await http.post("/v1/models/unload", json={"model": "double"})).json()["state"] == "unloaded"
        assert (await http.post("/v1/models/load", json={"model": "double"})).json()["state"] == "awake"
        assert (await http.post("/v1/models/load", json={})).json()["error"]["param"] == "model"
        for name in NAMES:
            await http.post("/v1/models/unload", json={"model": name})
        assert (await http.get("/v1/responses/resp_none")).status_code == 404
        assert set((await model_states(http)).values()) == {"unloaded"}
        await complete_token_ids(user, "stories")


async def test_requests_during_unload_return_200_or_503_with_retry_after(server: Server) -> None:
    texts = {"model": "double", "prompt": "the fox and the crow " * 500}
    async with client(server) as http:
        await complete_token_ids(http, "double")
        over = asyncio.Event()

        async def user(path: str, asked: dict[str, Any]) -> list[httpx.Response]:
            answers = []
            while not over.is_set():
                answers.append(await http.post(path, json=asked))
            return answers

        users = [user("/v1/completions", body("double", seed, 40)) for seed in range(8)]
        users += [user("/tokenize", texts) for _ in range(4)]
        tasks = [asyncio.create_task(each) for each in users]
        for _ in range(3):
            await asyncio.sleep(0.5)
            assert (await http.post("/v1/models/unload", json={"model": "double"})).status_code == 200
            await complete_token_ids(http, "double")
        over.set()
        answers = [each for answers in await asyncio.gather(*tasks) for each in answers]
        assert {each.status_code for each in answers} <= {200, 503}, [each.text for each in answers]
        rejections = [each for each in answers if each.status_code == 503]
        assert rejections
        assert all("Retry-After" in each.headers for each in rejections)
        assert "could not be restarted" not in server.log.read_text()


async def test_answer_is_unchanged_after_engine_kill(server: Server) -> None:
    async with client(server) as http:
        alone = await complete_token_ids(http, "stories", 1, LONGER)
        again = asyncio.create_task(complete_token_ids(http, "stories", 1, LONGER))
        await asyncio.sleep(0.3)
        pid = server.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert await again == alone


async def test_client_timeout_during_model_load_leaves_model_usable(server: Server) -> None:
    async with client(server) as http:
        await http.post("/v1/models/unload", json={"model": "tiny"})
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/completions", json=body("tiny", 0, 8), timeout=0.05)
        assert await complete_token_ids(http, "tiny")


def test_serve_rejects_model_with_models_file_and_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text("")
    server = Server(tmp_path / "log", DEMO_MODEL, "--models", str(file), wait=False)
    assert server.process.wait(60) == 2
    assert "give only one of them" in server.log.read_text()
    server = Server(tmp_path / "log", "--models", str(file), wait=False)
    assert server.process.wait(60) != 0
    assert "has no model" in server.log.read_text()
