"""--hf-overrides and the settings of generation_config.json apply to everything that reads a model's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.checkpoint.overrides import (
    read_raw_config_with_overrides,
    read_sampling_defaults,
    resolve_model_with_overrides,
)
from quire.engine.checkpoint.tensor_headers import read_checkpoint_size
from quire.engine.client.engine_client import EngineClient
from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.common.errors import ConfigError, ModelError
from quire.server.served_model import system_fingerprint
from tests.server.fake import FakeEngine, hashed


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_hf_overrides_apply_to_every_config_reader() -> None:
    config = EngineConfig(
        hf_overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}, "max_position_embeddings": 512}
    )
    path = resolve_model_with_overrides(config)
    assert path != Path(DEMO_MODEL)
    assert path.name == Path(DEMO_MODEL).name
    model = read_model_config(path)
    assert (model.max_position, model.rope["rope_theta"]) == (512, 5000.0)
    raw, folder = read_raw_config_with_overrides(config)
    assert raw["max_position_embeddings"] == 512
    assert folder == Path(DEMO_MODEL)
    assert read_checkpoint_size(path) == read_checkpoint_size(Path(DEMO_MODEL))
    assert (path / "tokenizer.json").read_bytes() == (Path(DEMO_MODEL) / "tokenizer.json").read_bytes()


def test_override_folder_is_stable_and_changes_with_contents(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 8}')
    config = EngineConfig(model=str(model), hf_overrides={"hidden_size": 4})
    first = resolve_model_with_overrides(config)
    assert resolve_model_with_overrides(config) == first
    assert resolve_model_with_overrides(EngineConfig(model=str(model), hf_overrides={"hidden_size": 5})) != first
    (model / "config.json").write_text('{"vocab_size": 9}')
    assert json.loads((resolve_model_with_overrides(config) / "config.json").read_text()) == {
        "vocab_size": 9,
        "hidden_size": 4,
    }
    assert resolve_model_with_overrides(EngineConfig(model=str(model))) == model
    assert resolve_model_with_overrides(EngineConfig(model=str(model), hf_overrides={})) == model


def test_hf_override_of_wrong_type_raises_model_error() -> None:
    config = EngineConfig(hf_overrides={"hidden_size": "many"})
    with pytest.raises(ModelError, match="hidden_size"):
        read_model_config(resolve_model_with_overrides(config))
    with pytest.raises(ModelError, match="hidden_size"):
        read_raw_config_with_overrides(config)


def test_hf_overrides_of_gguf_file_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="a GGUF file has no config"):
        resolve_model_with_overrides(EngineConfig(model=str(file), hf_overrides={"a": 1}))


async def test_system_fingerprint_changes_with_hf_overrides() -> None:
    engine = EngineClient(FakeEngine(hashed(b"a")))
    info = await engine.engine_core.start()
    await engine.engine_core.stop()
    default_fingerprint, overridden_fingerprint = (
        system_fingerprint(info, "", EngineConfig(hf_overrides=each)) for each in (None, {"rope_theta": 1.0})
    )
    assert default_fingerprint != overridden_fingerprint
    assert default_fingerprint == system_fingerprint(info, "", EngineConfig(hf_overrides={}))


def folder(tmp_path: Path, **content: object) -> str:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    return str(tmp_path)


def test_sampling_defaults_follow_generation_config_settings(tmp_path: Path) -> None:
    model_defaults = read_sampling_defaults(EngineConfig())
    assert read_sampling_defaults(EngineConfig(generation_config="vllm")) == {}
    config_dir = folder(tmp_path, temperature=0.3, top_k=7, max_new_tokens=64)
    assert read_sampling_defaults(EngineConfig(generation_config=config_dir)) == {
        "temperature": 0.3,
        "top_k": 7,
        "max_tokens": 64,
    }
    assert read_sampling_defaults(EngineConfig(override_generation_config={"top_p": 0.5})) == {
        **model_defaults,
        "top_p": 0.5,
    }
    overrides = {"temperature": None, "max_new_tokens": None, "min_p": 0.1}
    config = EngineConfig(generation_config=config_dir, override_generation_config=overrides)
    assert read_sampling_defaults(config) == {"top_k": 7, "min_p": 0.1}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"generation_config": "/nowhere"}, "generation_config: .*no generation_config.json in '/nowhere'"),
        ({"override_generation_config": {"num_beams": 2}}, "num_beams is not a sampling default"),
        ({"override_generation_config": {"temperature": -1}}, "override_generation_config: temperature"),
        ({"override_generation_config": {"max_new_tokens": 0}}, "max_new_tokens: expected an integer of 1 or more"),
    ],
)
def test_invalid_sampling_defaults_are_rejected(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_sampling_defaults(EngineConfig(**settings))  # type: ignore[arg-type]
