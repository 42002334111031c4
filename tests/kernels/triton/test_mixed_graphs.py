"""Tokens of Triton's mixed graphs, whose steps are padded, are those of requests alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.engine.worker.graphs import mixed_batch_graphs as prompt_graphs
from quire.engine.worker.loading import kv_allocation
from quire.kernels import backend_selection
from quire.kernels.gpu import triton_backend
from tests.engine.harness import request, run
from tests.kernels.triton.conftest import INTERPRETED, run_again
from tests.tiny_models import VOCAB, save_tiny_model


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "gpt_oss", "gemma2"])
def test_mixed_batch_graph_tokens_equal_single_request(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs pad steps with extra rows and sequences."""
    if INTERPRETED:
        monkeypatch.setattr(triton_backend.TritonBackend, "unsupported_reason", lambda *_: None)
    monkeypatch.setitem(
        backend_selection._BACKEND_FACTORIES,
        "triton",
        lambda deterministic: triton_backend.TritonBackend(deterministic=True),
    )
    options = {"model": str(save_tiny_model(tmp_path, family)), "attention_backend": "triton", "max_model_len": 96}
    generator = torch.Generator().manual_seed(7)
    shared = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (19, 3, 24)]
    requests = [request(str(i), prompt, seed=i, max_tokens=4, temperature=0.0) for i, prompt in enumerate(shared)]
    alone = EngineCore(EngineConfig(num_kv_blocks=40, enable_prefix_caching=False, **options))
    expected = [run(alone, [each])[each.id].ids for each in requests]
    monkeypatch.setattr(kv_allocation, "make_graph_capture", lambda *_: run_again)
    monkeypatch.setattr(prompt_graphs, "MIXED_GRAPH_PREFILL_SIZES", (16,))
    engine_options = {
        "num_kv_blocks": 40,
        "warmup_seconds": 0,
        "max_num_batched_tokens": 10,
        "enable_prefix_caching": False,
    }
    engine = EngineCore(EngineConfig(**engine_options, **options))
    for _ in range(2):
        outputs = run(engine, requests)
        assert [outputs[each.id].ids for each in requests] == expected
    assert engine.engine_stats.captured_prompt_steps > 2
