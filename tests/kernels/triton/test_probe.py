"""The probes that select a backend, on the Triton kernels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.checkpoint.model_resolver import read_model_config
from quire.engine.models import decoder_spec
from quire.engine.models.requirements import make_dummy_recurrence_params
from quire.kernels.gpu.recurrent import chunked_recurrence, triton_recurrence
from quire.kernels.gpu.triton_backend import TritonBackend
from quire.kernels.probes.backend_probe import PagedAttentionProbe
from quire.kernels.probes.chunked_recurrence_probe import ChunkedRecurrenceProbe
from quire.kernels.probes.mla_probe import MLAProbe
from quire.kernels.probes.recurrence_probe import RecurrenceProbe
from quire.kernels.recurrent.delta_rule import DeltaRule
from tests.tiny_models import FAMILIES, SHAPE

SHAPES = [(4, 2, 64), (3, 3, 96), (8, 1, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_probe_passes_triton(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], deterministic: bool
) -> None:
    probe = PagedAttentionProbe(device, dtype, *shape)
    assert probe(TritonBackend(deterministic=deterministic)) is None
    assert replace(probe, softcap=30.0)(TritonBackend(deterministic=deterministic)) is None


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "deterministic"),
    [
        (torch.float32, None, True),
        (torch.bfloat16, None, False),
        (torch.bfloat16, torch.int8, True),
        (torch.float16, torch.float8_e4m3fn, False),
    ],
)
def test_mla_probe_passes_triton(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None, deterministic: bool
) -> None:
    probe = MLAProbe(device, dtype, 2, (512, 64, 128, 128), kv_dtype=kv_dtype)
    assert probe(TritonBackend(deterministic=deterministic)) is None


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3_5", torch.float32),
        ("qwen3_5", torch.bfloat16),
        ("falcon_h1", torch.bfloat16),
        ("nemotron_h", torch.float16),
        ("jamba", torch.bfloat16),
        ("kimi_linear", torch.bfloat16),
    ],
)
def test_recurrence_probe_passes_triton(device: torch.device, family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | FAMILIES[family]))
    rules = make_dummy_recurrence_params(decoder_spec(read_model_config(tmp_path)), device)
    assert len(rules) == 1
    assert RecurrenceProbe(device, dtype, *rules[0])(TritonBackend()) is None


def test_mla_and_recurrence_probes_detect_wrong_results(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonBackend()
    attend, recur = backend.paged_attention, backend.run_recurrence
    monkeypatch.setattr(backend, "paged_attention", lambda *args: 1.1 * attend(*args))
    probe = MLAProbe(device, torch.bfloat16, 2, (64, 16, 32, 32))
    assert probe(backend) == "differs from the reference for a prompt's latents"
    rule = DeltaRule(-torch.ones(2), torch.ones(2), torch.ones(16), 1e-6, 1, 16)
    monkeypatch.setattr(backend, "run_recurrence", lambda *args: recur(*args).roll(1, 0))
    assert RecurrenceProbe(device, torch.bfloat16, rule, 16)(backend) == (
        "differs from the reference for a prompt of a DeltaRule"
    )


@pytest.fixture
def obeyed_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in chunks only after the trial, as GPUs other than Hopper do, and with their sizes."""
    monkeypatch.setattr(chunked_recurrence, "uses_hopper_sizes", lambda device: False)
    monkeypatch.setattr(chunked_recurrence, "needs_chunk_trial", lambda device: True)


CHUNK_PROBES = [(True, 1, 1, 40, 16), (False, 1, 1, 12, 16)]


@pytest.mark.usefixtures("obeyed_trial")
@pytest.mark.parametrize("sizes", CHUNK_PROBES, ids=["delta", "space"])
def test_chunked_recurrence_probe_passes_triton_and_restores_backend(
    device: torch.device, sizes: tuple[bool, int, int, int, int]
) -> None:
    backend = TritonBackend()
    assert ChunkedRecurrenceProbe(device, torch.bfloat16, *sizes)(backend) is None
    assert not backend.passed_chunk_trial


@pytest.mark.usefixtures("obeyed_trial")
def test_chunked_recurrence_probe_detects_wrong_states_other_bits_and_errors(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, runs = ChunkedRecurrenceProbe(device, torch.bfloat16, *CHUNK_PROBES[1]), list[int]()
    advance = triton_recurrence.advance_chunked

    def wrong(*args: Any) -> None:
        advance(*args)
        args[3].matrices.mul_(1.01)

    def unsteady(*args: Any) -> None:
        advance(*args)
        runs.append(1)
        args[0].mul_(1 + len(runs) / 100)

    def failing(*args: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    reasons = []
    for each in (wrong, unsteady, failing):
        monkeypatch.setattr(triton_recurrence, "advance_chunked", each)
        reasons.append(probe(backend := TritonBackend()))
        assert not backend.passed_chunk_trial
    assert reasons == [
        "chunks of a recurrence differ from single tokens",
        "chunks of a recurrence give other bits in a second run",
        "RuntimeError: out of resource: shared memory",
    ]


class LargePages(TritonBackend):
    block_size = 256
    """PyTorch's kernels have this block size and leave decode batches to Triton."""


def test_attention_probe_passes_triton_with_256_token_blocks(device: torch.device) -> None:
    assert PagedAttentionProbe(device, torch.bfloat16, 4, 2, 64)(LargePages()) is None


def test_attention_probe_detects_wrong_results(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonBackend()
    right = backend.paged_attention
    monkeypatch.setattr(backend, "paged_attention", lambda *args: right(*args).roll(1, 1))
    assert PagedAttentionProbe(device, torch.bfloat16, 4, 2, 64)(backend) == "differs from the reference for a prompt"
