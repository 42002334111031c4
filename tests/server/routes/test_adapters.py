"""LoRA adapters over HTTP: loading and unloading, together with all other features, and what is rejected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.client.engine_client import EngineClient
from quire.engine.common.errors import ConfigError
from quire.engine.lora.target_modules import adaptable_modules
from quire.engine.offline.in_process_client import InProcessClient
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.served_model import ServedModelSpec
from tests.adapters import save_adapter
from tests.server.api import Api
from tests.server.forked import FORKED
from tests.texts import CHATML, byte_level_tokenizer
from tests.tiny_models import VOCAB, save_tiny_model

LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny_model(tmp_path_factory.mktemp("model"), "llama")
    byte_level_tokenizer(CHATML).tokenizer.backend.save(str(path / "tokenizer.json"))  # for the engine's grammars
    return path


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base, root = AutoModelForCausalLM.from_pretrained(model), tmp_path_factory.mktemp("adapters")
    return [save_adapter(root / f"a{seed}", base, 4 * (seed + 1), seed=seed) for seed in range(4)]


@asynccontextmanager
async def serving(model: Path, **options: Any) -> AsyncIterator[Api]:
    """The app with an engine in this process."""
    settings = {"served_model_name": ["tiny"], "num_kv_blocks": 64, "enable_lora": True, "max_loras": 2, **options}
    config = ServerConfig(model=str(model), **settings)
    client = EngineClient(InProcessClient(config))
    modules = adaptable_modules(read_model_config(model))
    tokenizer = byte_level_tokenizer(CHATML).tokenizer
    app = create_app(client, ServedModelSpec(config, tokenizer, VOCAB, {}), modules, launch_process=FORKED)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://quire") as http,
    ):
        openai = AsyncOpenAI(base_url="http://quire/v1", api_key="none", http_client=http, max_retries=0)
        yield Api(client.engine_core, app, http, openai)  # type: ignore[arg-type]


def asked(name: str, **more: Any) -> dict[str, Any]:
    return {"model": name, "prompt": "a tale of " * 5, "max_tokens": 12, "temperature": 0, "logprobs": 1, **more}


async def load(api: Api, name: str, path: Path | str, status: int = 200, **more: Any) -> str:
    body = {"lora_name": name, "lora_path": str(path), **more}
    response = await api.http.post(LOAD, json=body)
    assert response.status_code == status, response.text
    return response.text


async def error(api: Api, path: str, body: dict[str, Any], status: int) -> dict[str, Any]:
    return dict((await api.post(path, body, status))["error"])


async def test_names_come_and_go(model: Path, folders: list[Path]) -> None:
    async with serving(model, lora_modules=[f"first={folders[0]}"]) as api:
        plain = (await api.post(COMPLETIONS, asked("tiny")))["choices"][0]
        first = (await api.post(COMPLETIONS, asked("first")))["choices"][0]
        assert first["logprobs"] != plain["logprobs"]
        assert await load(api, "second", folders[1]) == "Success: LoRA adapter 'second' added successfully."
        cards = (await api.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("tiny", None),
            ("first", "tiny"),
            ("second", "tiny"),
        ]
        assert (await api.http.get("/v1/models/second")).json()["parent"] == "tiny"
        second = await api.post(COMPLETIONS, asked("second"))
        assert second["model"] == "second"
        assert second["choices"][0]["logprobs"] != first["logprobs"]
        other = await error(api, LOAD, {"lora_name": "second", "lora_path": str(folders[2])}, 400)
        assert "other content" in other["message"]
        await load(api, "second", folders[1])  # the same content again
        await load(api, "second", folders[2], load_inplace=True)
        third = (await api.post(COMPLETIONS, asked("second")))["choices"][0]
        assert third["logprobs"] != second["choices"][0]["logprobs"]
        prints = [
            (await api.post(COMPLETIONS, asked(name)))["system_fingerprint"] for name in ("tiny", "first", "second")
        ]
        assert len({*prints, second["system_fingerprint"]}) == 4
        assert all(each.endswith("_deterministic") for each in prints)
        assert (await api.post(COMPLETIONS, asked("second")))["choices"][0] == third  # its prefix is cached now
        assert (await api.post(COMPLETIONS, asked("tiny")))["choices"][0] == plain
        response = await api.http.post(UNLOAD, json={"lora_name": "second"})
        assert response.text == "Success: LoRA adapter 'second' removed successfully."
        assert (await error(api, COMPLETIONS, asked("second"), 404))["code"] == "model_not_found"
        assert (await error(api, UNLOAD, {"lora_name": "second"}, 404))["param"] == "lora_name"


async def test_cached_prefixes_are_an_adapters_own(model: Path, folders: list[Path]) -> None:
    async with serving(model, lora_modules=[f"first={folders[0]}", f"same={folders[0]}"]) as api:

        async def cached(name: str) -> int:
            usage = (await api.post(COMPLETIONS, asked(name)))["usage"]
            return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

        assert [await cached(name) for name in ("tiny", "first")] == [0, 0]
        assert await cached("same") > 0  # it has the same content
        before = await cached("first")
        assert before > 0
        await load(api, "first", folders[1], load_inplace=True)
        assert await cached("first") == 0


@pytest.mark.slow
async def test_together_with_all_else(model: Path, folders: list[Path]) -> None:
    """Structured outputs, choices, beam search, chat and prompt logprobs give what they give alone, whatever runs
    meanwhile.
    """
    modules = [f"a{index}={folder}" for index, folder in enumerate(folders)]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "regex": (COMPLETIONS, {"structured_outputs": {"regex": "[a-f]{4,9}"}}),
        "choices": (COMPLETIONS, {"n": 3, "temperature": 1.0, "seed": 5}),
        "beams": (COMPLETIONS, {"use_beam_search": True, "n": 2, "logprobs": None}),
        "prompt": (COMPLETIONS, {"prompt_logprobs": 1, "echo": True}),
        "json": (
            "/v1/chat/completions",
            {
                "prompt": None,
                "logprobs": True,
                "messages": [{"role": "user", "content": "x" * 100, "name": "y" * 4200}],  # too large for one turn
                "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            },
        ),
    }

    async def answer(api: Api, kind: str, name: str) -> Any:
        path, more = kinds[kind]
        body = {key: value for key, value in asked(name, **more).items() if value is not None}
        return (await api.post(path, body))["choices"]

    async with serving(model, lora_modules=modules) as api:
        names = ["tiny", *(f"a{index}" for index in range(4))]
        alone = {(kind, name): await answer(api, kind, name) for kind in kinds for name in names}
        for kind in kinds:
            assert len({json.dumps(alone[kind, name]) for name in names}) > 2, kind
    async with serving(model, lora_modules=modules, num_kv_blocks=24) as api:
        together = await asyncio.gather(*[answer(api, *key) for key in alone])
        assert dict(zip(alone, together, strict=True)) == alone
        assert "vllm:lora_requests_info{max_lora=" in (await api.http.get("/metrics")).text


@pytest.mark.slow
async def test_refused(model: Path, folders: list[Path], tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    async with serving(model, allowed_lora_paths=[str(allowed)], api_key=["user"], admin_api_key=["root"]) as api:
        body = {"lora_name": "x", "lora_path": str(folders[0])}
        for path in (LOAD, UNLOAD):
            assert (await api.http.post(path, json=body)).status_code == 401
            denied = await api.http.post(path, json=body, headers={"Authorization": "Bearer user"})
            assert denied.status_code == 403
        api.http.headers["Authorization"] = "Bearer root"
        told = await error(api, LOAD, body, 400)
        assert told["param"] == "lora_path"
        assert told["code"] == "invalid_adapter"
        assert "--allowed-lora-paths" in told["message"]
        for name in ("", "tiny", "a\nb", " x", "y" * 300):
            assert (await error(api, LOAD, {**body, "lora_name": name}, 400))["param"] == "lora_name"
        assert (await error(api, LOAD, {"lora_name": "x"}, 400))["param"] == "lora_path"
        assert (await api.post(COMPLETIONS, asked("tiny")))["choices"]
    async with serving(model, enable_lora=False) as api:
        assert "--enable-lora" in (await error(api, LOAD, body, 400))["message"]
    for modules, told_of in (
        ([f"x={tmp_path}"], "adapter_config.json"),
        (["x"], "NAME=PATH"),
        (["tiny=y"], "own name"),
    ):
        with pytest.raises(ConfigError, match=told_of):
            async with serving(model, lora_modules=modules):
                pass


@pytest.mark.slow
async def test_vectors(model: Path, folders: list[Path]) -> None:
    async with serving(model, runner="pooling", lora_modules=[f"a{index}={folders[index]}" for index in (0, 1)]) as api:
        found = [
            (await api.post("/v1/embeddings", {"model": name, "input": "a tale of " * 9}))["data"][0]["embedding"]
            for name in ("tiny", "a0", "a1", "a0", "tiny")
        ]
    assert found[3:] == [found[1], found[0]]
    assert len({str(each) for each in found}) == 3


@pytest.mark.slow
async def test_loads_are_explained(model: Path, folders: list[Path]) -> None:
    """The explanation names the step before which the adapter was put into its slot. An adapter that is there is not
    put again.
    """
    async with serving(model, lora_modules=[f"a0={folders[0]}"]) as api:
        loads = []
        for name in ("one", "two"):
            response = await api.http.post(COMPLETIONS, json=asked("a0"), headers={"X-Request-Id": name})
            assert response.status_code == 200
            told = (await api.http.get(f"/v1/requests/{response.json()['id']}/explain")).json()
            (sequence,) = told["sequences"]
            loads.append(sequence["adapter_loads"])
            first = sequence["batches"][0]
    ((load,), none) = loads
    assert none == []
    assert (load["adapter"], load["engine"], load["step"]) == ("a0", 0, 1)
    assert load["held_ms"] >= 0
    assert first["first_step"] > 1


@pytest.mark.slow
async def test_kept_for_the_next_start(model: Path, folders: list[Path], tmp_path: Path) -> None:
    """Adapters that were loaded at run time come back with the content that they had then."""
    kept = {"data_dir": str(tmp_path / "data")}
    own = save_adapter(tmp_path / "own", AutoModelForCausalLM.from_pretrained(model), 4, seed=9)
    async with serving(model, lora_modules=[f"fixed={folders[0]}"], **kept) as api:
        await load(api, "mine", own)
        await load(api, "gone", folders[1])
        await api.http.post(UNLOAD, json={"lora_name": "gone"})
        before = (await api.post(COMPLETIONS, asked("mine")))["choices"]
    for path, mode in (("data", 0o700), ("data/adapters", 0o700), ("data/adapters.json", 0o600)):
        assert (tmp_path / path).stat().st_mode & 0o777 == mode
    save_adapter(own, AutoModelForCausalLM.from_pretrained(model), 4, seed=10)
    async with serving(model, **kept) as api:
        assert [card["id"] for card in (await api.http.get("/v1/models")).json()["data"]] == ["tiny", "mine"]
        assert (await api.post(COMPLETIONS, asked("mine")))["choices"] == before
    async with serving(model, max_lora_rank=2, **kept) as api:  # it no longer fits, and is left out
        assert [card["id"] for card in (await api.http.get("/v1/models")).json()["data"]] == ["tiny"]
