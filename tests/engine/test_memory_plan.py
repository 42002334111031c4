"""The arithmetic of KV memory, and what is refused."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loop import Engine
from engine.model_files import read_model_config
from engine.plan import GIB, page_bytes, plan_kv
from tests.tiny_models import save_tiny_model


def test_pages_cost_what_the_formula_says_and_the_context_is_fitted(tmp_path: Path) -> None:
    model = read_model_config(save_tiny_model(tmp_path, "llama"))
    each = page_bytes(model, 16, "bfloat16")
    assert each == 2 * 16 * 2 * 16 * 2 * 3
    plan = plan_kv(model, dtype="bfloat16", block_size=16, available_bytes=10 * each + 5, max_num_seqs=8)
    assert (plan.num_blocks, plan.max_model_len, plan.kv_bytes) == (10, 160, 10 * each)
    roomy = plan_kv(model, dtype="bfloat16", block_size=16, available_bytes=GIB, max_num_seqs=8)
    assert (roomy.num_blocks, roomy.max_model_len) == (8 * 32, 512), "no more than all sequences could use"


def test_a_context_that_cannot_fit_is_refused_with_all_numbers(tmp_path: Path) -> None:
    model = read_model_config(save_tiny_model(tmp_path, "llama"))
    each = page_bytes(model, 16, "float32")
    with pytest.raises(ConfigError) as error:
        plan_kv(model, dtype="float32", block_size=16, available_bytes=3 * each, max_num_seqs=1, max_model_len=200)
    assert error.value.param == "max_model_len"
    for number in (f"{13 * each:,}", f"{3 * each:,}", "48 tokens"):
        assert number in error.value.message
    with pytest.raises(ConfigError, match="512 positions"):
        plan_kv(model, dtype="float32", block_size=16, available_bytes=GIB, max_num_seqs=1, max_model_len=513)


def test_the_engine_allocates_what_was_planned(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    engine = Engine(EngineConfig(model=str(path), kv_cache_memory=1 / 1024, max_num_seqs=4))
    info = engine.info
    assert info.kv_bytes == info.num_blocks * page_bytes(read_model_config(path), info.block_size, "float32")
    assert GIB / 1024 * 0.9 < info.kv_bytes <= GIB / 1024
    assert sum(k.nbytes + v.nbytes for k, v in engine.runner._kv_cache) == info.kv_bytes
    with pytest.raises(ConfigError, match="the longest that fits is 16 tokens"):
        Engine(EngineConfig(model=str(path), num_kv_blocks=1, max_model_len=32))
