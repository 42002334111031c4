"""The engine on Triton attention, fused kernels and sampling gives the tokens of plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.engine.worker import batch_sampler
from quire.engine.worker.sampling.device_sampler import sample_on_device
from quire.kernels.gpu import triton_backend
from tests.engine.harness import request, run
from tests.engine.images.test_families import about
from tests.kernels.triton.conftest import INTERPRETED
from tests.tiny_models import VOCAB, save_tiny_model
from tests.vision_families import save_family

KINDS = [
    {},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 30},
    {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in ("qwen3", "mistral-window", "gemma2", "gemma3", "lfm2", "gpt_oss", "qwen3-moe")),
        *(
            (family, {})
            for family in ("qwen3_5", "falcon_h1", "nemotron_h", "jamba", "deepseek_v2-lite", "youtu", "kimi_linear")
        ),
        ("deepseek_v3", {"kv_cache_dtype": "int8"}),
        ("qwen2", {"quantization": "int4", "quantize_embedding": False, "dtype": "float32"}),
    ],
    ids=str,
)
def test_triton_engine_tokens_equal_reference(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if INTERPRETED:
        monkeypatch.setattr(triton_backend.TritonBackend, "unsupported_reason", lambda *_: None)
        monkeypatch.setattr(batch_sampler, "choose_sampler", lambda device, argmax, draw, group: sample_on_device)
    path = save_tiny_model(tmp_path, family)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (3, 9, 36)]

    def answers(backend: str) -> list[list[int]]:
        # On a GPU "auto" would choose bfloat16, whose rounding changes tokens.
        engine_options = {"num_kv_blocks": 64, "max_num_batched_tokens": 32, "dtype": "float32"}
        engine_options["enforce_eager"] = backend == "reference"  # a CUDA graph cannot capture the reference
        config = EngineConfig(model=str(path), attention_backend=backend, **engine_options | options)
        asked = zip(prompts, KINDS, strict=True)
        requests = [request(str(i), prompt, seed=i, max_tokens=4, **kind) for i, (prompt, kind) in enumerate(asked)]
        engine = EngineCore(config)
        held = "quantization" in options and backend == "reference"
        assert ("held in" in engine.info.quantization) == held
        outputs = run(engine, requests)
        return [outputs[str(i)].ids for i in range(len(prompts))]

    assert answers("triton") == answers("reference")


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_triton_engine_image_tokens_equal_reference(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Image tokens see each other; features enter after the first layers; positions are by row and column."""
    if INTERPRETED:
        monkeypatch.setattr(triton_backend.TritonBackend, "unsupported_reason", lambda *_: None)
        monkeypatch.setattr(batch_sampler, "choose_sampler", lambda device, argmax, draw, group: sample_on_device)
    path = save_family(tmp_path, name)
    requests = [about(path, name, "one", 1, max_tokens=3), about(path, name, "two", 2, 3, max_tokens=3)]

    def answers(backend: str) -> dict[str, list[int]]:
        engine_options = {"num_kv_blocks": 64, "dtype": "float32", "enforce_eager": backend == "reference"}
        config = EngineConfig(model=str(path), attention_backend=backend, **engine_options)
        return {name: each.ids for name, each in run(EngineCore(config), requests).items()}

    assert answers("triton") == answers("reference")
