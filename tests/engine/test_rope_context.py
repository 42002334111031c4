"""LongRoPE: requested context, not available memory, selects the rotation factors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.config import EngineConfig, capacity_settings_from_info
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore
from quire.server.served_model import system_fingerprint
from tests.engine.harness import Answer, request, run
from tests.engine.tiers.fakes import always
from tests.tiny_models import save_tiny_model

OLD, MOST = 128, 1024
"""Tokens up to which the short factors apply; the model's positions."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    positions = {"max_position_embeddings": MOST, "original_max_position_embeddings": OLD}
    return save_tiny_model(tmp_path_factory.mktemp("phi3"), "phi3-longrope", **positions)


def engine(path: Path, **options: Any) -> EngineCore:
    config = EngineConfig(model=str(path), dtype="float32", **{"num_kv_blocks": 70, **options})
    return EngineCore(config, make_tiers=always)


def answer(made: EngineCore) -> Answer:
    return run(made, [request("0", [3 + 7 * at % 300 for at in range(60)], max_tokens=20, logprobs=0)])["0"]


@pytest.mark.few(1)
@pytest.mark.parametrize("impl", ["quire", "transformers"])
def test_longrope_factors_follow_max_model_len_not_memory(impl: str, path: Path) -> None:
    long, short = (answer(engine(path, model_impl=impl, max_model_len=most)) for most in (OLD + 16, OLD))
    assert long.logprobs != short.logprobs
    small = EngineConfig(model=str(path), model_impl=impl, dtype="float32", num_kv_blocks=OLD // 16)
    first = EngineCore(small)
    assert (first.info.max_model_len, first.info.rope_context) == (OLD, MOST)
    assert answer(first) == long == answer(engine(path, model_impl=impl))
    anew = small.model_copy(update=capacity_settings_from_info(first.info))
    assert answer(EngineCore(anew)) == long, "in the place of one that has died"
    assert answer(engine(path, model_impl=impl, max_model_len=OLD, rope_context=MOST)) == long
    by_short = engine(path, model_impl=impl, rope_context=OLD)
    assert answer(by_short) == short
    assert by_short.info.max_model_len == OLD


def test_longrope_tokens_equal_transformers_backend(path: Path) -> None:
    for options in ({}, {"max_model_len": OLD}, {"num_kv_blocks": OLD // 16}):
        native, by_transformers = (
            answer(engine(path, model_impl=impl, **options)) for impl in ("quire", "transformers")
        )
        assert native.ids == by_transformers.ids, options


def test_kv_blocks_on_disk_are_reused_only_for_same_rope_context(path: Path, tmp_path: Path) -> None:
    cached = []
    for most in (OLD, OLD + 16, OLD + 32, OLD + 16):
        made = engine(path, max_model_len=most, kv_offload_dir=str(tmp_path / "pages"))
        found = answer(made)
        assert found.logprobs == answer(engine(path, max_model_len=most)).logprobs
        cached.append(found.cached_tokens)
        made.shut_down()
    assert cached == [0, 0, 0, 48]


def test_system_fingerprint_depends_on_rope_context(path: Path, tmp_path: Path) -> None:
    def fingerprint(folder: Path, **options: Any) -> str:
        made = engine(folder, **options)
        return system_fingerprint(made.info, "1", EngineConfig(model=str(path)))

    assert fingerprint(path, max_model_len=OLD) != fingerprint(path, max_model_len=OLD + 16)
    llama = save_tiny_model(tmp_path, "llama")
    assert fingerprint(llama, max_model_len=OLD) == fingerprint(llama, max_model_len=OLD + 16)
    with pytest.raises(ConfigError, match="rope_context: the model's rotations depend on no context"):
        engine(llama, rope_context=OLD)
