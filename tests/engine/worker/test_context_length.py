"""The context length that a KV cache allows, checked before weights are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.config import EngineConfig, capacity_settings_from_info
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore
from tests.tiny_models import save_tiny_model

ONE_SEQUENCE: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 32, "enable_prefix_caching": False}


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v2-dense", "lfm2", "qwen3_5", "mamba2"])
def test_engine_with_capacity_of_another_engine_starts(family: str, tmp_path: Path) -> None:
    """As after a crash. Recurrent states are outside of the blocks that `num_kv_blocks` counts."""
    config = EngineConfig(model=str(save_tiny_model(tmp_path, family)), kv_cache_memory=0.002, **ONE_SEQUENCE)
    info = EngineCore(config).info
    again = EngineCore(config.model_copy(update=capacity_settings_from_info(info))).info
    assert (again.max_model_len, again.num_blocks) == (info.max_model_len, info.num_blocks)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v2-dense", "lfm2", "qwen3_5"])
def test_longest_context_is_accepted_and_longer_ones_are_refused(family: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family, max_position_embeddings=100_000)
    config = EngineConfig(model=str(path), kv_cache_memory=0.002, **ONE_SEQUENCE)
    longest = EngineCore(config).info.max_model_len
    assert 0 < longest < 100_000
    accepted = EngineCore(config.model_copy(update={"max_model_len": longest}))
    assert accepted.info.max_model_len == longest
    with pytest.raises(ConfigError, match=r"^max_model_len: .* the longest that fits is at most") as error:
        EngineCore(config.model_copy(update={"max_model_len": 2 * longest}))
    assert error.value.param == "max_model_len"
