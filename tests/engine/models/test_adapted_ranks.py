"""Tensor parallelism of transformers' classes, by the classes' own plans, gives the tokens of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore
from quire.engine.lora.adapter_store import AdapterStore
from tests.adapters import save_adapter
from tests.engine.harness import run
from tests.engine.lora.test_parity import asked as lora_asked
from tests.engine.ranks import thread_ranks
from tests.engine.test_ranks import MISSING, SMALL, asked, assert_same, engine, one_thread, prompts
from tests.tiny_classes import save_tiny_class
from tests.tiny_models import save_tiny_model

__all__ = ["one_thread", "thread_ranks"]
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.usefixtures("one_thread"),
]
KINDS = ["laguna", "olmo", "mimo_v2_flash", "gemma4_unified_text", "axk1", "hy_v3", "nanochat"]
"""These have experts, soft caps, sinks, heads of several sizes, and MLA."""


def save_model(path: Path, kind: str) -> Path:
    path.mkdir()
    save_tiny_class(path, kind)
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallel_transformers_class_equals_single_process(kind: str, tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", kind)
    expected = run(engine(path, 1, **SMALL), asked())
    divided = engine(path, 2, **SMALL)
    assert divided.info.deterministic
    actual = run(divided, asked())
    assert_same(actual, expected)
    for each in asked():  # promise 2 (batch invariance), at this number of ranks
        divided.reset_prefix_cache()
        (alone,) = run(divided, [each]).values()
        assert (alone.ids, alone.logprobs) == (actual[each.id].ids, actual[each.id].logprobs)


@pytest.mark.slow
@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization": "int4"}], ids=str)
def test_tensor_parallel_class_with_lora_or_quantization(options: dict[str, Any], tmp_path: Path) -> None:
    """LoRA gives the answers of one rank. With quantization, each rank quantizes its own part, and tokens are
    batch-invariant.
    """
    path = save_model(tmp_path / "model", "laguna")
    base = AutoModelForCausalLM.from_pretrained(path)
    folder = save_adapter(tmp_path / "a", base, 8, targets=("q_proj", "o_proj", "lm_head"), seed=5)
    settings = {"enable_lora": True, "max_lora_rank": 8, "num_kv_blocks": 64}
    answers = []
    for ranks in (1, 2):
        serving = engine(path, ranks, **settings)
        (tmp_path / f"spool{ranks}").mkdir()
        adapter = AdapterStore(tmp_path / f"spool{ranks}", serving.info.adaptable, 8).add_adapter("a", str(folder))
        params = {"max_tokens": 6, "logprobs": 1, "prompt_logprobs": None}
        requests = [lora_asked(str(i), ids, (adapter, None)[i % 2], **params) for i, ids in enumerate(prompts())]
        answers.append(run(serving, requests))
    assert_same(*answers)
    few = engine(path, 2, num_kv_blocks=64, **options)
    together = run(few, asked())
    few.reset_prefix_cache()
    for each in asked():
        assert run(few, [each])[each.id].ids == together[each.id].ids


@pytest.mark.parametrize(
    ("kind", "ranks", "said"),
    [
        ("persimmon", 2, "PersimmonForCausalLM has no tensor-parallel plan"),
        ("laguna", 3, "3 ranks do not divide 64 numbers"),
        ("laguna", 4, "LagunaForCausalLM"),
        ("longcat_flash", 2, "its tensor-parallel plan"),
    ],
)
def test_class_that_ranks_cannot_divide_is_rejected_with_reason(
    kind: str, ranks: int, said: str, tmp_path: Path
) -> None:
    path = save_model(tmp_path / "model", kind)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size: .*{said}"):
        engine(path, ranks, num_kv_blocks=64)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks' processes are Linux's")
@pytest.mark.slow
def test_two_processes_of_transformers_class_equal_single_process(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3")
    options: dict[str, Any] = {"num_kv_blocks": 64, "dtype": "float32", "model_impl": "transformers"}
    actual = run(EngineCore(EngineConfig(model=str(path), tensor_parallel_size=2, **options)), asked())
    assert_same(actual, run(EngineCore(EngineConfig(model=str(path), **options)), asked()))
