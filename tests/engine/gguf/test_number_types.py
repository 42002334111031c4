"""Quantized GGUF files compute in float32 with a bfloat16 KV cache, batch-invariantly (promise 2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.checkpoint.model_resolver import read_raw_config
from quire.engine.checkpoint.sizes.model_sizes import read_model_sizes
from quire.engine.checkpoint.tensor_headers import read_checkpoint_size
from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.kernels.cpu.backend import CpuBackend
from quire.server.cli.plan.estimate import PlanRequest
from quire.server.cli.plan.estimate_builder import estimate_model
from quire.server.cli.plan.machine import Machine
from tests.engine.harness import request, run
from tests.tiny_models import save_tiny_model

gguf_models = pytest.importorskip("tests.gguf_models", reason="the package gguf is not installed")
write_delta_gguf = pytest.importorskip("tests.gguf_deltas").write_delta_gguf
pytestmark = pytest.mark.skipif(CpuBackend().missing_reason is not None, reason=str(CpuBackend().missing_reason))


@pytest.mark.parametrize(
    ("kind", "settings", "dtype", "pages"),
    [
        ("Q8_0", {}, "float32", "bfloat16"),
        ("Q4_0", {"kv_cache_dtype": "int8"}, "float32", "int8"),
        ("Q8_0", {"dtype": "float32"}, "float32", "auto"),
        ("Q8_0", {"dtype": "bfloat16"}, "bfloat16", "auto"),
        ("Q8_0", {"attention_backend": "reference"}, "bfloat16", "auto"),
        ("F16", {}, "bfloat16", "auto"),
        ("BF16", {"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "float32", "bfloat16"),
    ],
)
def test_gguf_compute_dtype_and_kv_dtype_equal_plan(
    kind: str, settings: dict[str, str], dtype: str, pages: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "folder", "llama", hidden_size=64, intermediate_size=128)
    file = gguf_models.write_gguf(folder, tmp_path / "model.gguf", lambda _: kind)
    info = EngineCore(EngineConfig(model=str(file), num_kv_blocks=8, **settings)).info
    assert (info.dtype, info.kv_cache_dtype) == (dtype, pages)
    if "attention_backend" not in settings:
        sizes, stored = read_model_sizes(read_raw_config(str(file))[0]), read_checkpoint_size(file)
        planned = estimate_model(
            sizes, Machine("test", 2**30, gpu=False), PlanRequest(EngineConfig(**settings)), stored
        )
        assert (planned.dtype, planned.block_bytes) == (dtype, info.kv_bytes // 8)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_gguf_outputs_do_not_depend_on_batching_or_preemption(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "folder", family, hidden_size=128)
    write_file = write_delta_gguf if family == "qwen3_5" else gguf_models.write_gguf
    file = write_file(folder, tmp_path / "model.gguf", lambda _: "Q8_0")
    requests = [request(str(n), list(range(3, 30 + 9 * n)), max_tokens=16, logprobs=0) for n in range(4)]

    def tokens_and_logprobs(**settings: int) -> dict[str, tuple[list[int], list[float]]]:
        engine = EngineCore(EngineConfig(model=str(file), **{"num_kv_blocks": 64} | settings))
        assert engine.info.dtype == "float32"
        return {
            name: (each.ids, [one.logprob for one in each.logprobs]) for name, each in run(engine, requests).items()
        }

    together = tokens_and_logprobs()
    assert tokens_and_logprobs(max_num_seqs=1) == together
    assert tokens_and_logprobs(max_num_batched_tokens=7) == together
    assert tokens_and_logprobs(num_kv_blocks=12, max_model_len=128) == together
