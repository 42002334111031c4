"""Answers that may differ have different system fingerprints."""

from __future__ import annotations

import shutil
from pathlib import Path

from msgspec.structs import replace

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.common.types import EngineInfo
from quire.engine.tiers.kv_identity import WeightFiles, model_sample_digest
from quire.server.served_model import system_fingerprint

INFO = EngineInfo("m", "float32", "cpu", "b", 1, 1, 1, 1, 1, 0.0, "a")


def test_fingerprint_differs_by_settings_that_change_bits() -> None:
    configs = [
        EngineConfig(),
        EngineConfig(quantization="int8"),
        EngineConfig(quantization="int8", activation_bits="8"),
        EngineConfig(quantization="int8", activation_bits="16"),
        EngineConfig(quantization="int4"),
        EngineConfig(kv_cache_dtype="int8"),
        EngineConfig(tensor_parallel_size=2),
    ]
    fingerprints = {
        system_fingerprint(replace(INFO, kv_cache_dtype=config.kv_cache_dtype), "1", config) for config in configs
    }
    assert len(fingerprints) == len(configs)
    assert system_fingerprint(INFO, "1", EngineConfig()) == system_fingerprint(
        INFO, "1", EngineConfig(max_num_batched_tokens=64)
    )


def test_fingerprint_depends_on_code_and_weights_not_on_folder(tmp_path: Path) -> None:
    """An upgrade within a version, weights of which some were replaced, and a folder that was moved."""

    def fingerprint(folder: Path) -> str:
        config = EngineConfig(model=str(folder))
        content = model_sample_digest(read_model_config(folder), WeightFiles(config))
        return system_fingerprint(replace(INFO, model=config.model, content=content, code="a"), "1", config)

    folders = [tmp_path / name for name in ("here", "moved")]
    for folder in folders:
        shutil.copytree(DEMO_MODEL, folder)
    assert fingerprint(folders[0]) == fingerprint(folders[1])
    weights = folders[1] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-40_000:] = content[-40_000:][::-1]
    weights.write_bytes(content)
    assert fingerprint(folders[0]) != fingerprint(folders[1]), "two pieces in a hundred are others"
    assert system_fingerprint(replace(INFO, code="a"), "1", EngineConfig()) != system_fingerprint(
        INFO, "1", EngineConfig()
    )


def test_model_digest_is_empty_when_weights_change_during_load(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    files, model = WeightFiles(EngineConfig(model=str(folder))), read_model_config(folder)
    assert model_sample_digest(model, files)
    (folder / "model.safetensors").write_bytes(b"others")
    assert model_sample_digest(model, files) == ""
    assert model_sample_digest(model, None) == ""
