"""LoRA adapters over HTTP: loading and unloading, together with all other features, and what is rejected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
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
from tests.server.api import Api, open_app
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
    async with open_app(app, client.engine_core) as api:
        yield api


def completion_body(name: str, **more: Any) -> dict[str, Any]:
    return {"model": name, "prompt": "a tale of " * 5, "max_tokens": 12, "temperature": 0, "logprobs": 1, **more}


async def load(api: Api, name: str, path: Path | str, status: int = 200, **more: Any) -> str:
    body = {"lora_name": name, "lora_path": str(path), **more}
    response = await api.http.post(LOAD, json=body)
    assert response.status_code == status, response.text
    return response.text


async def post_error(api: Api, path: str, body: dict[str, Any], status: int) -> dict[str, Any]:
    return dict((await api.post(path, body, status))["error"])


async def test_lora_adapters_load_replace_and_unload(model: Path, folders: list[Path]) -> None:
    async with serving(model, lora_modules=[f"first={folders[0]}"]) as api:
        plain = (await api.post(COMPLETIONS, completion_body("tiny")))["choices"][0]
        first = (await api.post(COMPLETIONS, completion_body("first")))["choices"][0]
        assert first["logprobs"] != plain["logprobs"]
        assert await load(api, "second", folders[1]) == "Success: LoRA adapter 'second' added successfully."
        cards = (await api.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("tiny", None),
            ("first", "tiny"),
            ("second", "tiny"),
        ]
        assert (await api.http.get("/v1/models/second")).json()["parent"] == "tiny"
        second = await api.post(COMPLETIONS, completion_body("second"))
        assert second["model"] == "second"
        assert second["choices"][0]["logprobs"] != first["logprobs"]
        other = await post_error(api, LOAD, {"lora_name": "second", "lora_path": str(folders[2])}, 400)
        assert "other content" in other["message"]
        await load(api, "second", folders[1])  # the same content again
        await load(api, "second", folders[2], load_inplace=True)
        third = (await api.post(COMPLETIONS, completion_body("second")))["choices"][0]
        assert third["logprobs"] != second["choices"][0]["logprobs"]
        prints = [
            (await api.post(COMPLETIONS, completion_body(name)))["system_fingerprint"]
            for name in ("tiny", "first", "second")
        ]
        assert len({*prints, second["system_fingerprint"]}) == 4
        assert all(each.endswith("_deterministic") for each in prints)
        assert (await api.post(COMPLETIONS, completion_body("second")))["choices"][
            0
        ] == third  # its prefix is cached now
        assert (await api.post(COMPLETIONS, completion_body("tiny")))["choices"][0] == plain
        response = await api.http.post(UNLOAD, json={"lora_name": "second"})
        assert response.text == "Success: LoRA adapter 'second' removed successfully."
        assert (await post_error(api, COMPLETIONS, completion_body("second"), 404))["code"] == "model_not_found"
        assert (await post_error(api, UNLOAD, {"lora_name": "second"}, 404))["param"] == "lora_name"


async def test_cached_prefixes_are_shared_only_by_equal_adapters(model: Path, folders: list[Path]) -> None:
    async with serving(model, lora_modules=[f"first={folders[0]}", f"same={folders[0]}"]) as api:

        async def cached_tokens(name: str) -> int:
            usage = (await api.post(COMPLETIONS, completion_body(name)))["usage"]
            return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

        assert [await cached_tokens(name) for name in ("tiny", "first")] == [0, 0]
        assert await cached_tokens("same") > 0  # it has the same content
        before = await cached_tokens("first")
        assert before > 0
        await load(api, "first", folders[1], load_inplace=True)
        assert await cached_tokens("first") == 0


@pytest.mark.slow
async def test_cache_diagnostics_take_adapters_for_other_models(model: Path, folders: list[Path]) -> None:
    async with serving(model, lora_modules=[f"first={folders[0]}", f"same={folders[0]}"]) as api:
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": "a tale of " * 5}]}
        first = await api.post("/v1/messages", {**body, "model": "first", "diagnostics": {}})
        compared = {**body, "diagnostics": {"previous_message_id": first["id"]}}
        same = await api.post("/v1/messages", {**compared, "model": "same"})
        assert same["diagnostics"] is None
        found = same["usage"]["cache_read_input_tokens"]
        assert found > 0
        plain = await api.post("/v1/messages", {**compared, "model": "tiny"})
        reason = {"type": "model_changed", "cache_missed_input_tokens": found}
        assert plain["diagnostics"] == {"cache_miss_reason": reason}
        assert plain["usage"]["cache_read_input_tokens"] == 0
    async with serving(model, enable_prefix_caching=False) as api:
        answer = await api.post("/v1/messages", {**body, "diagnostics": {"previous_message_id": "msg_x"}})
        assert answer["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}


async def test_adapter_outputs_are_equal_alone_and_batched(model: Path, folders: list[Path]) -> None:
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
        body = {key: value for key, value in completion_body(name, **more).items() if value is not None}
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
async def test_unauthorized_or_invalid_adapter_loads_are_rejected(
    model: Path, folders: list[Path], tmp_path: Path
) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    async with serving(model, allowed_lora_paths=[str(allowed)], api_key=["user"], admin_api_key=["root"]) as api:
        body = {"lora_name": "x", "lora_path": str(folders[0])}
        for path in (LOAD, UNLOAD):
            assert (await api.http.post(path, json=body)).status_code == 401
            denied = await api.http.post(path, json=body, headers={"Authorization": "Bearer user"})
            assert denied.status_code == 403
        api.http.headers["Authorization"] = "Bearer root"
        error_body = await post_error(api, LOAD, body, 400)
        assert error_body["param"] == "lora_path"
        assert error_body["code"] == "invalid_adapter"
        assert "--allowed-lora-paths" in error_body["message"]
        for name in ("", "tiny", "a\nb", " x", "y" * 300):
            assert (await post_error(api, LOAD, {**body, "lora_name": name}, 400))["param"] == "lora_name"
        assert (await post_error(api, LOAD, {"lora_name": "x"}, 400))["param"] == "lora_path"
        assert (await api.post(COMPLETIONS, completion_body("tiny")))["choices"]
    async with serving(model, enable_lora=False) as api:
        assert "--enable-lora" in (await post_error(api, LOAD, body, 400))["message"]
    for modules, told_of in (
        ([f"x={tmp_path}"], "adapter_config.json"),
        (["x"], "NAME=PATH"),
        (["tiny=y"], "own name"),
    ):
        with pytest.raises(ConfigError, match=told_of):
            async with serving(model, lora_modules=modules):
                pass


@pytest.mark.slow
async def test_adapter_embeddings_are_distinct_and_unchanged_by_prefix_cache(model: Path, folders: list[Path]) -> None:
    async with serving(model, runner="pooling", lora_modules=[f"a{index}={folders[index]}" for index in (0, 1)]) as api:
        embeddings = [
            (await api.post("/v1/embeddings", {"model": name, "input": "a tale of " * 9}))["data"][0]["embedding"]
            for name in ("tiny", "a0", "a1", "a0", "tiny")
        ]
    assert embeddings[3:] == [embeddings[1], embeddings[0]]
    assert len({str(each) for each in embeddings}) == 3


@pytest.mark.slow
async def test_explain_reports_adapter_load_of_first_request_only(model: Path, folders: list[Path]) -> None:
    """The explanation names the step before which the adapter was put into its slot. An adapter that is there is not
    put again.
    """
    async with serving(model, lora_modules=[f"a0={folders[0]}"]) as api:
        loads = []
        for name in ("one", "two"):
            response = await api.http.post(COMPLETIONS, json=completion_body("a0"), headers={"X-Request-Id": name})
            assert response.status_code == 200
            explanation = (await api.http.get(f"/v1/requests/{response.json()['id']}/explain")).json()
            (sequence,) = explanation["sequences"]
            loads.append(sequence["adapter_loads"])
            first = sequence["batches"][0]
    ((load,), none) = loads
    assert none == []
    assert (load["adapter"], load["engine"], load["step"]) == ("a0", 0, 1)
    assert load["held_ms"] >= 0
    assert first["first_step"] > 1


@pytest.mark.slow
async def test_loaded_adapters_survive_restart_with_data_dir(model: Path, folders: list[Path], tmp_path: Path) -> None:
    """Adapters that were loaded at run time come back with the content that they had then."""
    storage = {"data_dir": str(tmp_path / "data")}
    adapter_path = save_adapter(tmp_path / "own", AutoModelForCausalLM.from_pretrained(model), 4, seed=9)
    async with serving(model, lora_modules=[f"fixed={folders[0]}"], **storage) as api:
        await load(api, "mine", adapter_path)
        await load(api, "gone", folders[1])
        await api.http.post(UNLOAD, json={"lora_name": "gone"})
        before = (await api.post(COMPLETIONS, completion_body("mine")))["choices"]
    for path, mode in (("data", 0o700), ("data/adapters", 0o700), ("data/adapters.json", 0o600)):
        assert (tmp_path / path).stat().st_mode & 0o777 == mode
    save_adapter(adapter_path, AutoModelForCausalLM.from_pretrained(model), 4, seed=10)
    async with serving(model, **storage) as api:
        assert [card["id"] for card in (await api.http.get("/v1/models")).json()["data"]] == ["tiny", "mine"]
        assert (await api.post(COMPLETIONS, completion_body("mine")))["choices"] == before
    async with serving(model, max_lora_rank=2, **storage) as api:  # it no longer fits, and is left out
        assert [card["id"] for card in (await api.http.get("/v1/models")).json()["data"]] == ["tiny"]
