"""Configuration errors are reported before the model is loaded (issue 58, D 14)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.engine.common.errors import ConfigError
from quire.server.adapter_registry import check_local_adapters
from quire.server.config import ServerConfig
from quire.server.runtime.model_spec_loader import load_served_model_spec


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/nowhere/adapter", "there is no folder '/nowhere/adapter', and it is not a hub id"),
        ("adapter", "there is no folder 'adapter', and it is not a hub id"),
    ],
)
def test_missing_adapter_folder_is_reported_by_name(path: str, why: str) -> None:
    config = ServerConfig(enable_lora=True, lora_modules=[f"tales={path}"])
    with pytest.raises(ConfigError, match=f"lora_modules: tales: {why}"):
        load_served_model_spec(config)


def test_incomplete_adapter_folder_is_reported_by_name(tmp_path: Path) -> None:
    config = ServerConfig(enable_lora=True, lora_modules=[f"tales={tmp_path}"])
    with pytest.raises(ConfigError, match=r"lora_modules: tales: there is no adapter_config\.json"):
        load_served_model_spec(config)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    with pytest.raises(ConfigError, match=r"lora_modules: tales: there is no adapter_model\.safetensors"):
        load_served_model_spec(config)


def test_hub_adapter_is_not_checked_early() -> None:
    config = ServerConfig(enable_lora=True, lora_modules=["tales=owner/adapter"])
    check_local_adapters(config, None)
