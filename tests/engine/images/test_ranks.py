"""Tensor-parallel and pipeline ranks answer about images like one process, and batch-invariantly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.engine.images.vision_config import read_vision_spec
from quire.kernels.cpu.backend import CpuBackend
from tests.engine.harness import Answer, run
from tests.engine.images.test_families import about
from tests.engine.ranks import thread_ranks
from tests.vision_families import FAMILIES, save_family

__all__ = ["thread_ranks"]
MISSING = CpuBackend().missing_reason
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.usefixtures("thread_ranks"),
]
KINDS = ["gemma3", "gemma4", "qwen3_vl", *(name for name in FAMILIES if name not in ("gemma3", "gemma4", "qwen3_vl"))]


def engine(path: Path, ranks: int, **options: Any) -> EngineCore:
    plain = {"num_kv_blocks": 96, "dtype": "float32", "attention_backend": "cpu", "threads": 4}
    return EngineCore(EngineConfig(model=str(path), tensor_parallel_size=ranks, **plain, **options))


def logprobs_of(answer: Answer) -> list[float]:
    return [each.logprob for each in answer.logprobs]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_tensor_parallel_image_answers_equal_single_process(name: str, tmp_path: Path) -> None:
    path = save_family(tmp_path, name)
    requests = [about(path, name, "a", 1), about(path, name, "b", 2, 3)]
    expected, divided = run(engine(path, 1), requests), engine(path, 2)
    assert not divided.info.no_images
    actual = run(divided, requests)
    for each in requests:
        assert actual[each.id].ids == expected[each.id].ids
        assert logprobs_of(actual[each.id]) == pytest.approx(logprobs_of(expected[each.id]), abs=5e-5, rel=1e-6)
        divided.reset_prefix_cache()
        (alone,) = run(divided, [each]).values()
        assert (alone.ids, alone.logprobs) == (actual[each.id].ids, actual[each.id].logprobs)


def encoded_image_counts(each: EngineCore) -> list[int]:
    """The number of images, or parts of them, that the first rank's tower has encoded; empty without a tower."""
    return [] if each.executor._encoder_cache._tower is None else [each.executor._encoder_cache.num_encoded]  # type: ignore[attr-defined]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [each for each in KINDS if each != "gemma4 of 2 B"])
def test_pipeline_stages_image_answers_equal_single_process(name: str, tmp_path: Path) -> None:
    """The first stage has the tower. Answers are bitwise equal, alone and in a batch, with images encoded in chunks."""
    path = save_family(tmp_path, name, num_hidden_layers=4) if name == "qwen3_vl" else save_family(tmp_path, name)
    requests = [about(path, name, "a", 1), about(path, name, "b", 2, 3)]
    vision = read_vision_spec(path)
    assert vision is not None
    least = max(
        24,
        *(span.count for each in requests for span in each.spans),
        vision.max_bidirectional_tokens if vision.is_bidirectional else 0,
    )
    options: dict[str, Any] = {
        "num_kv_blocks": 96,
        "dtype": "bfloat16",
        "attention_backend": "cpu",
        "max_num_batched_tokens": least,
    }
    one = EngineCore(EngineConfig(model=str(path), **options))
    expected = run(one, requests)
    divided = EngineCore(EngineConfig(model=str(path), pipeline_parallel_size=2, **options))
    assert not divided.info.no_images
    assert divided.info.weight_bytes >= one.info.weight_bytes
    assert encoded_image_counts(divided) == []
    actual = run(divided, requests)
    for each in requests:
        divided.reset_prefix_cache()
        (alone,) = run(divided, [each]).values()
        for answer in (actual[each.id], alone):
            assert (answer.ids, answer.logprobs) == (expected[each.id].ids, expected[each.id].logprobs)
