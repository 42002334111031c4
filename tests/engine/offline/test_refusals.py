"""Tests what `LLM` rejects before it loads weights, and what it logs about choices that a user might not expect (issue
58).
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore
from quire.engine.offline.llm import LLM
from tests.tiny_models import save_tiny_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model whose weights lack a tensor, so that loading them fails."""
    path = save_tiny_model(tmp_path, "llama", max_position_embeddings=1_000_000)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_model_len": 2_000_000}, "exceeds the model's 1000000 positions"),
        ({"max_model_len": 900_000, "kv_cache_memory": 0.01}, "a context of 900000 tokens needs"),
        ({"max_model_len": 900_000, "num_kv_blocks": 8}, "a context of 900000 tokens needs"),
    ],
)
def test_too_long_context_is_rejected_before_weights_load(path: Path, settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineCore(EngineConfig(model=str(path), **settings))  # type: ignore[arg-type]
    assert says in str(raised.value)
    assert raised.value.param == "max_model_len"


def test_fitting_context_is_accepted_before_weights_load(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the weights lack model\.norm\.weight"):
        EngineCore(EngineConfig(model=str(path), max_model_len=900_000, kv_cache_memory=2.0))


def test_sliding_window_layers_allow_longer_context(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gemma3", max_position_embeddings=100_000)
    engine = EngineCore(EngineConfig(model=str(path), max_model_len=18_000, kv_cache_memory=0.02))
    assert engine.info.max_model_len == 18_000


def test_llm_logs_once_when_dtype_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_tiny_model(tmp_path, "llama")
    with caplog.at_level(logging.WARNING, "quire.engine.offline"):
        llm = LLM(str(path), dtype="float16", skip_tokenizer_init=True, num_kv_blocks=8)
    llm.close()
    assert llm.info.dtype == "bfloat16"
    messages = [record.getMessage() for record in caplog.records if "float16" in record.getMessage()]
    assert len(messages) == 1
    assert "--dtype float32" in messages[0]
