"""The SDPA backend, which gathers KV blocks, against the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.engine.common.config import EngineConfig
from quire.engine.engine_core import EngineCore
from quire.kernels.backend import Backend
from quire.kernels.backend_selection import AttentionRequirements, select_backend
from quire.kernels.gpu.libraries import flash2
from quire.kernels.gpu.libraries.sdpa import SdpaBackend
from quire.kernels.probes.backend_probe import PagedAttentionProbe
from quire.kernels.reference import ReferenceBackend
from tests.engine.harness import request, run
from tests.kernels.fake_flash import FakeFlashAttn
from tests.kernels.installed import install_flash
from tests.kernels.ragged import attend, error, random_part
from tests.tiny_models import save_tiny_model

DECODES = [(1, 1), (40, 1), (130, 1), (17, 1)]
MIX = [(40, 1), (1, 1), (5, 5), (300, 20), (129, 129), (77, 1)]


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("mix", [DECODES, MIX], ids=["decodes", "mixed"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (7, 1, 64), (8, 2, 128)])
def test_sdpa_attention_matches_reference(
    heads: int, kv_heads: int, dim: int, mix: list[tuple[int, int]], window: int | None, generator: torch.Generator
) -> None:
    parts = [random_part(c, q, heads, kv_heads, dim, torch.float64, generator) for c, q in mix]
    for chunked in (False, True):
        expected = attend(ReferenceBackend(), parts, window=window, chunked=chunked)
        for output, reference_output in zip(
            attend(SdpaBackend(), parts, window=window, chunked=chunked), expected, strict=True
        ):
            assert error(output, reference_output) < 1e-12


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("backend", ["sdpa", "flash"])
def test_bidirectional_attention_matches_reference(
    backend: str, window: int | None, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the page layout of both backends, next to unwritten pages; sequences of one shape are computed together."""
    mix = [(300, 20), (40, 40), (40, 40), (40, 40), (5, 5), (130, 130), (77, 1)]
    parts = [random_part(keys, queries, 6, 2, 24, torch.float64, generator) for keys, queries in mix]
    install_flash(monkeypatch, FakeFlashAttn())
    attention_backend: Backend = SdpaBackend() if backend == "sdpa" else flash2.Flash2Backend()
    expected = attend(ReferenceBackend(), parts, window=window, ahead=None)
    for output, reference_output in zip(
        attend(attention_backend, parts, window=window, ahead=None), expected, strict=True
    ):
        assert error(output, reference_output) < 1e-12


def test_flash_reports_unsupported_chunked_attention() -> None:
    requirements = {"sinks": False, "latents": False, "chunks": True}
    assert SdpaBackend().unsupported_attention_reason(**requirements) is None
    assert "chunked attention" in str(
        flash2.Flash2Backend.unsupported_attention_reason(
            flash2.Flash2Backend.__new__(flash2.Flash2Backend), **requirements
        )
    )


def test_probe_passes_sdpa() -> None:
    assert PagedAttentionProbe(torch.device("cpu"), torch.bfloat16, 8, 2, 64, has_windows=True)(SdpaBackend()) is None
    assert (
        PagedAttentionProbe(torch.device("cpu"), torch.bfloat16, 8, 2, 64, has_windows=True, has_chunked_windows=True)(
            SdpaBackend()
        )
        is None
    )


def test_sdpa_engine_tokens_equal_reference(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gemma3")
    prompts = [list(range(3, 3 + length)) for length in (1, 7, 40, 90)]

    def tokens(backend: str) -> dict[str, list[int]]:
        config = EngineConfig(model=str(path), dtype="float32", attention_backend=backend, num_kv_blocks=64)
        engine = EngineCore(config.model_copy(update={"max_num_batched_tokens": 32}))
        outputs = run(engine, [request(str(number), prompt) for number, prompt in enumerate(prompts)])
        return {name: answer.ids for name, answer in outputs.items()}

    assert tokens("sdpa") == tokens("reference")


def test_sdpa_is_rejected_for_softcap_and_quantized_kv() -> None:
    backend, why = select_backend(torch.device("cpu"), torch.float32, 64, "sdpa")
    assert (backend.name, why.endswith("; asked for")) == ("sdpa", True)
    with pytest.raises(ValueError, match="sdpa: has no softcap"):
        select_backend(torch.device("cpu"), torch.float32, 64, "sdpa", AttentionRequirements(softcap=True))
    with pytest.raises(ValueError, match="sdpa: keeps keys and values in the model's type"):
        select_backend(torch.device("cpu"), torch.float32, 64, "sdpa", AttentionRequirements(kv_dtype=torch.int8))


def test_sdpa_is_selected_before_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    backend, why = select_backend(torch.device("cuda"), torch.float16, 64)
    assert backend.name == "sdpa"
    assert "torch_varlen: " in why
    assert "triton" not in why
