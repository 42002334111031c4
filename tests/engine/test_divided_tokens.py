"""Decode context parallelism gives the bits of tensor parallelism with divided heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.text.grammar_compiler import json_grammar
from quire.kernels.cpu.backend import CpuBackend
from tests.engine.harness import Answer, request, run
from tests.engine.images.test_families import about
from tests.engine.ranks import thread_ranks
from tests.engine.test_ranks import one_thread
from tests.tiers import pair_in_rotation
from tests.tiny_models import VOCAB, save_tiny_model
from tests.vision_families import save_family

__all__ = ["one_thread", "thread_ranks"]
MISSING = CpuBackend().missing_reason
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.usefixtures("thread_ranks", "one_thread"),
]
LENGTH = 1200
BASE = {"attention_backend": "cpu", "threads": 4, "max_model_len": LENGTH, "max_num_batched_tokens": 300}
"""Prompts come in chunks that end within tiles."""


def engine(path: Path, ranks: int, *, divides: bool, **settings: Any) -> EngineCore:
    dividing = {"decode_context_parallel_size": ranks} if divides else {}
    return EngineCore(EngineConfig(model=str(path), **{"tensor_parallel_size": ranks, **BASE, **dividing, **settings}))


def asked(seed: int = 5) -> list[EngineCoreRequest]:
    """Contexts of one tile, of one tile per rank, and longer ones; some share a prefix."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(3, VOCAB, (LENGTH,), generator=generator).tolist()
    lengths = [(3, {}), (250, {"logprobs": 2}), (505, {"temperature": 0.8, "logprobs": 0}), (1100, {"logprobs": 1})]
    kinds: list[tuple[int, dict[str, Any]]] = [*lengths, (600, {"prompt_logprobs": 0, "logprobs": 0})]
    return [request(str(at), text[:length], seed=at, max_tokens=20, **kind) for at, (length, kind) in enumerate(kinds)]


def assert_equal_answers(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert found.keys() == expected.keys()
    for name, answer in expected.items():
        assert found[name].ids == answer.ids, name
        assert found[name].logprobs == answer.logprobs, name
        assert found[name].prompt_logprobs == answer.prompt_logprobs, name


FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "gpt_oss", "bloom", "deepseek_v2-lite", "mixtral", "falcon-newer"]
FAMILIES += ["gemma4-small", "gemma4"]
"""Windows, sinks, ALiBi, latents, layers that read others' pages, heads of two sizes; more key-value heads than
ranks, and fewer."""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "ranks", "dtype"),
    [
        *((family, 2, dtype) for family, dtype in pair_in_rotation(FAMILIES, ["bfloat16", "float32"])),
        *((family, 4, dtype) for family, dtype in pair_in_rotation(FAMILIES, ["float32", "bfloat16"])),
    ],
)
def test_context_parallel_gives_bits_of_ranks_that_divide_heads(
    family: str, ranks: int, dtype: str, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, family, max_position_embeddings=2048)
    expected = run(engine(path, ranks, divides=False, dtype=dtype), asked())
    divided = engine(path, ranks, divides=True, dtype=dtype)
    assert_equal_answers(run(divided, asked()), expected)
    assert_equal_answers(run(divided, asked()), expected)  # with cached prefixes, also by copies of partial blocks
    divided.reset_prefix_cache()
    for each in asked():  # alone, after a reset of the prefix cache
        assert_equal_answers(run(divided, [each]), {each.id: expected[each.id]})


PAIRS: dict[str, dict[str, Any]] = {
    "int8": {"kv_cache_dtype": "int8"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "int4": {"quantization": "int4", "dtype": "bfloat16"},
    "preempted": {"num_kv_blocks": 3},
    "drafts": {"speculative_config": "ngram"},
    "decodes": {"max_num_batched_tokens": 1200, "max_num_seqs": 2},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("setting", PAIRS)
def test_context_parallel_equals_tensor_parallel_with_other_settings(setting: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", max_position_embeddings=2048, intermediate_size=256)
    options = PAIRS[setting]
    whole = {name: value for name, value in options.items() if name != "num_kv_blocks"}
    expected = run(engine(path, 2, divides=False, **whole), asked())
    divided = engine(path, 2, divides=True, **options)
    assert_equal_answers(run(divided, asked()), expected)
    assert divided.engine_stats.preemptions > 0 or setting != "preempted"


def test_context_parallel_grammar_after_long_prompt_equals_tensor_parallel(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", max_position_embeddings=2048)
    requests = [
        request("json", asked()[3].prompt_ids, seed=1, max_tokens=30, temperature=1.0, grammar=json_grammar({}))
    ]
    expected = run(engine(path, 2, divides=False), requests)
    assert_equal_answers(run(engine(path, 2, divides=True), requests), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["qwen3_vl", "llava", "gemma4 of 2 B", "gemma3"])
def test_context_parallel_image_prompts_equal_tensor_parallel(name: str, tmp_path: Path) -> None:
    """The vision tower divides no keys. A model whose image tokens see each other serves text only."""
    path = save_family(tmp_path, name)
    options = {"dtype": "float32", "max_model_len": 2048, "max_num_batched_tokens": 2048, "num_kv_blocks": 160}
    divided = engine(path, 2, divides=True, **options)
    if name == "gemma3":
        assert "--decode-context-parallel-size" in divided.info.no_images
        assert_equal_answers(run(divided, [asked()[0]]), run(engine(path, 2, divides=False, **options), [asked()[0]]))
        return
    requests = [about(path, name, "a", 1), about(path, name, "b", 2, 3), about(path, name, "c", 1, 2)]
    expected = run(engine(path, 2, divides=False, **options), requests)
    assert_equal_answers(run(divided, requests), expected)
    assert_equal_answers(run(divided, requests), expected)


def test_context_parallel_serves_context_larger_than_one_rank(tmp_path: Path) -> None:
    """With one key-value head, ranks that divide heads each keep the whole context; ranks that divide tokens keep a
    part.
    """
    path = save_tiny_model(tmp_path, "llama", max_position_embeddings=8192, num_key_value_heads=1)
    memory = {"kv_cache_memory": 2**20 / 2**30, "max_model_len": None, "max_num_seqs": 1}
    contexts = [engine(path, 2, divides=divides, **memory).info.max_model_len for divides in (False, True)]
    assert 1.8 * contexts[0] < contexts[1] < 8192, "pages are larger, so it is not quite twice"
    text = (asked()[3].prompt_ids * 8)[: contexts[0] + 300]
    plenty = {"max_model_len": 8192, "num_kv_blocks": 600}
    requests = [request("long", text, seed=1, max_tokens=9, logprobs=1)]
    expected = run(engine(path, 2, divides=False, **plenty), requests)
    assert_equal_answers(run(engine(path, 2, divides=True, **memory), requests), expected)


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("llama", {"attention_backend": "sdpa"}, "sdpa: does not return the log-sum-exp"),
        ("llama", {"tensor_parallel_size": 4}, "all ranks of tensor_parallel_size, 4"),
        ("lfm2", {}, "state of a whole sequence"),
        ("qwen3_5", {}, "state of a whole sequence"),
        ("llama", {"model_impl": "transformers"}, "keeps keys and values in its own type"),
        ("llama", {"kv_offload_memory": 0.01}, "tensor_parallel_size"),
        ("llama", {"speculative_config": {"method": "draft_model", "model": "embedded"}}, "its own KV cache"),
    ],
)
def test_context_parallel_rejects_unsupported_settings(
    family: str, settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, family)
    with pytest.raises((ConfigError, ValueError), match=why):
        engine(path, 2, divides=True, **{"max_model_len": 500, **settings})
