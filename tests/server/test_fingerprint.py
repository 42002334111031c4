"""Answers that may differ have different fingerprints."""

from __future__ import annotations

from msgspec.structs import replace

from quire.engine.config import EngineConfig
from quire.engine.types import EngineInfo
from quire.server.served_model import fingerprint

INFO = EngineInfo("m", "float32", "cpu", "b", 1, 1, 1, 1, 1, 0.0, "a")


def test_each_setting_that_changes_bits_is_told() -> None:
    tried = [
        EngineConfig(),
        EngineConfig(quantization="int8"),
        EngineConfig(quantization="int8", activation_bits="8"),
        EngineConfig(quantization="int8", activation_bits="16"),
        EngineConfig(quantization="int4"),
        EngineConfig(kv_cache_dtype="int8"),
        EngineConfig(tensor_parallel_size=2),
    ]
    told = {fingerprint(replace(INFO, kv_cache_dtype=config.kv_cache_dtype), "1", config) for config in tried}
    assert len(told) == len(tried)
    assert fingerprint(INFO, "1", EngineConfig()) == fingerprint(INFO, "1", EngineConfig(max_num_batched_tokens=64))
