"""Recurrent and MLA models on deterministic Triton give the same tokens with all features on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.engine.spec_decode.draft_length import AdaptiveLengthDrafter
from quire.engine.worker.graphs import mixed_batch_graphs as prompt_graphs
from quire.engine.worker.loading import kv_allocation
from quire.kernels import backend_selection
from quire.kernels.gpu import triton_backend
from tests.engine.harness import request, run
from tests.engine.test_speculation import CHEAP, Garbage
from tests.kernels.triton.conftest import INTERPRETED, run_again
from tests.tiny_models import VOCAB, save_tiny_model


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "falcon_mamba", "deepseek_v2-dense"])
def test_tokens_do_not_depend_on_batch_chunks_cache_or_drafts(
    family: str, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with each request alone and uncached. graphs: decodes and drafts are rows of one token each, as in CUDA
    graphs.
    """
    if INTERPRETED:
        monkeypatch.setattr(triton_backend.TritonBackend, "unsupported_reason", lambda *_: None)
    monkeypatch.setitem(
        backend_selection._BACKEND_FACTORIES,
        "triton",
        lambda deterministic: triton_backend.TritonBackend(deterministic=True),
    )
    options = {"model": str(save_tiny_model(tmp_path, family)), "attention_backend": "triton", "max_model_len": 96}
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(3, VOCAB, (37,), generator=generator).tolist()
    prompts = [[*shared[:33], 9, 10], [5, 6, 7], shared]
    requests = [request(str(i), prompt, seed=i, max_tokens=7, temperature=0.0) for i, prompt in enumerate(prompts)]
    alone = EngineCore(EngineConfig(num_kv_blocks=40, enable_prefix_caching=False, **options))
    expected = [run(alone, [each])[each.id].ids for each in requests]
    if graphs:
        monkeypatch.setattr(kv_allocation, "make_graph_capture", lambda *_: run_again)
        monkeypatch.setattr(prompt_graphs, "MIXED_GRAPH_PREFILL_SIZES", (32,))
    engine = EngineCore(
        EngineConfig(num_kv_blocks=40, warmup_seconds=0, max_num_batched_tokens=21, snapshot_tokens=16, **options),
        make_drafter=lambda *_: AdaptiveLengthDrafter(Garbage(random.Random(3)), 8, CHEAP),
    )
    for _ in range(2):
        outputs = run(engine, requests)
        assert [outputs[each.id].ids for each in requests] == expected
    assert engine.engine_stats.prefix_hits > 0
    assert engine.engine_stats.draft_tokens > 0
