"""The trial that chooses a backend, on the Triton kernels themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.engine.checkpoint.files import read_model_config
from quire.engine.models import decoder_spec
from quire.engine.models.asked import sample_rules
from quire.kernels.gpu.triton_paged import Triton
from quire.kernels.latents.probe import LatentProbe
from quire.kernels.probe import Probe
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.recurrent.probe import RuleProbe
from tests.tiny_models import FAMILIES, SHAPE

SHAPES = [(4, 2, 64), (3, 3, 96), (8, 1, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_kernels_pass(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], deterministic: bool
) -> None:
    probe = Probe(device, dtype, *shape)
    assert probe(Triton(deterministic=deterministic)) is None
    assert replace(probe, softcap=30.0)(Triton(deterministic=deterministic)) is None


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "deterministic"),
    [
        (torch.float32, None, True),
        (torch.bfloat16, None, False),
        (torch.bfloat16, torch.int8, True),
        (torch.float16, torch.float8_e4m3fn, False),
    ],
)
def test_latents_pass(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype | None, deterministic: bool
) -> None:
    probe = LatentProbe(device, dtype, 2, (512, 64, 128, 128), kv_dtype=kv_dtype)
    assert probe(Triton(deterministic=deterministic)) is None


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3_5", torch.float32),
        ("qwen3_5", torch.bfloat16),
        ("falcon_h1", torch.bfloat16),
        ("nemotron_h", torch.float16),
        ("jamba", torch.bfloat16),
    ],
)
def test_rules_pass(device: torch.device, family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | FAMILIES[family]))
    rules = sample_rules(decoder_spec(read_model_config(tmp_path)), device)
    assert len(rules) == 1
    assert RuleProbe(device, dtype, *rules[0])(Triton()) is None


def test_what_is_wrong_with_latents_and_rules_fails(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Triton()
    attend, recur = backend.paged_attention, backend.recur
    monkeypatch.setattr(backend, "paged_attention", lambda *args: 1.1 * attend(*args))
    probe = LatentProbe(device, torch.bfloat16, 2, (64, 16, 32, 32))
    assert probe(backend) == "computes something else than the reference for a prompt's latents"
    rule = DeltaRule(-torch.ones(2), torch.ones(2), torch.ones(16), 1e-6, 1, 16)
    monkeypatch.setattr(backend, "recur", lambda *args: recur(*args).roll(1, 0))
    assert RuleProbe(device, torch.bfloat16, rule, 16)(backend) == (
        "computes something else than the reference for a prompt of a DeltaRule"
    )


class LargePages(Triton):
    block_size = 256
    """As those of PyTorch's kernels, whose steps of one query each are Triton's."""


def test_pages_of_256(device: torch.device) -> None:
    assert Probe(device, torch.bfloat16, 4, 2, 64)(LargePages()) is None


def test_what_is_wrong_fails(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Triton()
    right = backend.paged_attention
    monkeypatch.setattr(backend, "paged_attention", lambda *args: right(*args).roll(1, 1))
    assert Probe(device, torch.bfloat16, 4, 2, 64)(backend) == "computes something else than the reference for a prompt"
