"""Presets of `--models`: names with a system message and defaults, on the engine of another table's model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.client.engine_client import EngineClient
from quire.engine.common.config import DEMO_MODEL
from quire.engine.common.errors import ConfigError
from quire.server.access.tenants import Tenants
from quire.server.config import ServerConfig
from quire.server.multi_model.added_models import AddedModels
from quire.server.multi_model.model_manager import ModelManager
from quire.server.multi_model.models_config import ModelEntry, ModelsConfig, read_models_file
from quire.server.multi_model.multi_model_app import create_multi_model_app
from quire.server.runtime.model_runtime import ModelRuntime
from quire.server.runtime.model_startup import open_runtime
from quire.server.runtime.server_context import ServerContext
from quire.server.served_model import ServedModelSpec
from tests.server.api import VOCAB_SIZE, open_http
from tests.server.fake import FakeEngine, hashed
from tests.server.forked import FORKED
from tests.texts import CHATML, byte_level_tokenizer

SMALL = f'[small]\nmodel = "{DEMO_MODEL}"\n'
PIRATE = (
    '[pirate]\nmodel = "small"\nserved_model_name = ["buccaneer"]\nsystem = "Speak as a pirate."\n'
    "parameters = {temperature = 0.25, top_k = 3, max_tokens = 4, stop = ['z']}\n"
)
MESSAGES = [{"role": "user", "content": "Hi"}]


def read_models(tmp_path: Path, text: str) -> ModelsConfig:
    file = tmp_path / "models.toml"
    file.write_text(text)
    return read_models_file(file, {})


@asynccontextmanager
async def open_app(settings: ModelsConfig) -> AsyncIterator[tuple[list[FakeEngine], httpx.AsyncClient, ServerContext]]:
    engines: list[FakeEngine] = []

    @asynccontextmanager
    async def open_model(entry: ModelEntry) -> AsyncIterator[ModelRuntime]:
        source = ServedModelSpec(entry.config, byte_level_tokenizer(CHATML).tokenizer, VOCAB_SIZE, {})
        engines.append(engine := FakeEngine(hashed(b"abcdef")))
        async with open_runtime(
            source, None, EngineClient(engine), has_api_keys=False, folder=None, launch_process=FORKED
        ) as runtime:
            yield runtime

    config = ServerConfig()
    app = create_multi_model_app(
        ModelManager(settings, open_model), settings, AddedModels(settings, None), config, Tenants(config)
    )
    async with open_http(app) as http:
        yield engines, http, app.state.server


def prompt(engine: FakeEngine) -> str:
    return byte_level_tokenizer(None).tokenizer.decode(list(engine.seen[-1].prompt_ids), skip_special_tokens=False)


async def test_preset_applies_system_message_and_defaults_on_shared_engine(tmp_path: Path) -> None:
    async with open_app(read_models(tmp_path, SMALL + PIRATE)) as (engines, http, _):
        listed = (await http.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["small", "pirate", "buccaneer"]
        for name in ("pirate", "buccaneer"):
            answer = (await http.post("/v1/chat/completions", json={"model": name, "messages": MESSAGES})).json()
            assert (answer["model"], answer["usage"]["completion_tokens"]) == (name, 4)
            params = engines[0].seen[-1].params
            assert (params.temperature, params.top_k, params.stop) == (0.25, 3, ("z",))
            assert "Speak as a pirate." in prompt(engines[0])
        await http.post("/v1/chat/completions", json={"model": "small", "messages": MESSAGES, "max_tokens": 2})
        assert "pirate" not in prompt(engines[0])
        assert engines[0].seen[-1].params.temperature == 1.0
        assert len(engines) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("/v1/responses", {"input": "Hi"}),
        ("/api/chat", {"messages": MESSAGES, "stream": False}),
        ("/api/generate", {"prompt": "Hi", "stream": False}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_api_applies_preset(path: str, body: dict[str, Any], stream: bool, tmp_path: Path) -> None:
    async with open_app(read_models(tmp_path, SMALL + PIRATE)) as (engines, http, _):
        name = "pirate:latest" if path.startswith("/api/") else "pirate"
        answer = await http.post(path, json={**body, "model": name, "stream": stream})
        assert answer.status_code == 200, answer.text
        assert "Speak as a pirate." in prompt(engines[0])
        assert engines[0].seen[-1].params.temperature == 0.25
        assert engines[0].seen[-1].params.max_tokens == 4


async def test_preset_parameters_apply_to_llama_cpp_endpoints(tmp_path: Path) -> None:
    async with open_app(read_models(tmp_path, SMALL + PIRATE)) as (engines, http, _):
        for fields, most in (({}, 4), ({"n_predict": 2}, 2), ({"n_predict": 0}, 1)):
            answer = await http.post("/completion", json={"model": "pirate", "prompt": "Hi", **fields})
            assert answer.status_code == 200, answer.text
            params = engines[0].seen[-1].params
            assert (params.temperature, params.max_tokens) == (0.25, most)
        warm_up = {"model": "pirate", "messages": MESSAGES, "n_predict": 0}
        answer = await http.post("/v1/chat/completions", json=warm_up)
        assert answer.json()["usage"]["completion_tokens"] == 0


async def test_request_fields_override_preset(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    async with open_app(read_models(tmp_path, SMALL + PIRATE)) as (engines, http, _):
        body = {"model": "pirate", "messages": messages, "temperature": 0, "max_completion_tokens": 2}
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        assert answer["usage"]["completion_tokens"] == 2
        assert "Be brief." in prompt(engines[0])
        assert "pirate" not in prompt(engines[0])
        assert engines[0].seen[-1].params.temperature == 0
        wrong = await http.post("/v1/chat/completions", json={"model": "pirate", "messages": "no"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages")
        broken = await http.post(
            "/v1/chat/completions?model=pirate", content=b"{", headers={"content-type": "application/json"}
        )
        assert broken.status_code == 400


async def test_model_table_can_set_system_message(tmp_path: Path) -> None:
    async with open_app(read_models(tmp_path, SMALL + 'system = "Be kind."\n')) as (engines, http, _):
        for body in ({"messages": MESSAGES}, {"messages": MESSAGES, "model": "small"}):
            await http.post("/v1/chat/completions", json=body)
            assert "Be kind." in prompt(engines[0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[a]\nmodel = "small"\ndtype = "float32"\n', "a: dtype is an engine setting: set it in the table of small"),
        ('[a]\nmodel = "b"\n[b]\nmodel = "small"\n', "a: model: b is itself a preset"),
        ('[a]\nmodel = "small"\nsystem = 3\n', "a: system: must be a text"),
        ('[a]\nmodel = "small"\nparameters = 3\n', "a: parameters: must be a table"),
        ('[a]\nmodel = "small"\nparameters = {n = 2}\n', "a: parameters.n: there are temperature"),
        ('[a]\nmodel = "small"\nparameters = {temperature = 9}\n', "a: parameters.*temperature"),
        ('[a]\nmodel = "small"\nserved_model_name = ["small"]\n', "small uses the name 'small' twice"),
        ('[a]\nmodel = "small"\nserved_model_name = "x"\n', "a: served_model_name: must be a list"),
    ],
)
def test_invalid_preset_is_rejected_with_reason(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read_models(tmp_path, SMALL + text)


def test_added_model_cannot_set_system_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="system can be set only in the file"):
        read_models(tmp_path, SMALL).parse_added_entry("b", {"model": DEMO_MODEL, "system": "x"})
