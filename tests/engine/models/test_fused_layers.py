"""Layers that run in one native call give bitwise the logprobs of layers that run function by function."""

from pathlib import Path

import pytest
import torch

from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.kernels.cpu.backend import CpuBackend
from tests.engine.harness import request, run
from tests.tiny_models import FAMILIES, VOCAB, save_tiny_model

MISSING = CpuBackend().missing_reason
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.mark.few(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_layers_equal_unfused_layers_bitwise(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not CpuBackend().prefers_native_linear(getattr(torch, dtype)):
        pytest.skip("linears of this type are oneDNN's on this machine: no layers are fused")
    path = save_tiny_model(tmp_path, family)
    generator = torch.Generator().manual_seed(3)
    # Enough sequences that their KV blocks are prefetched while linears multiply.
    prompts = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in (1, 5, 18, 40) * 4]

    def answers() -> list[tuple[list[int], list[float]]]:
        engine = EngineCore(EngineConfig(model=str(path), dtype=dtype, attention_backend="cpu", num_kv_blocks=96))
        requests = [request(str(i), prompt, max_tokens=12, logprobs=0) for i, prompt in enumerate(prompts)]
        outputs = run(engine, requests)
        assert (engine.executor._model._recorded_layers[1] is None) == (not fused)
        return [(outputs[r.id].ids, [each.logprob for each in outputs[r.id].logprobs]) for r in requests]

    fused = True
    together = answers()
    monkeypatch.setattr(CpuBackend, "record_layers", lambda *_, **__: None)
    fused = False
    assert answers() == together
