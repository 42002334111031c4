"""Selective scans against transformers. Their bits must not depend on how sequences are cut, with wrong and right
drafts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.recurrent.selective_scan import SelectiveScan
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import error
from tests.kernels.recurrences import SLOTS, Kept, Row, Shape, cut_at_random, given, parts, whole
from tests.tiers import runs_rest, slow

TOLERANCE = {torch.float64: 2e-6, torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""transformers' scan keeps its decay rates in float32."""


def made(heads: int, key: int, value: int, generator: torch.Generator, *, norm: bool = False, far: float = 1) -> Shape:
    """`far`: the magnitude of time steps."""
    rate = -2 * torch.rand((heads, key, value), generator=generator)
    shift, skip = (torch.randn(heads * value, generator=generator) for _ in range(2))
    norms = [torch.randn(key, generator=generator) if norm else None for _ in range(2)]
    return Shape(SelectiveScan(rate, far * shift, skip, norms[0], norms[1], 1e-5), heads, key, value)


def expected(shape: Shape, numbers: Tensor) -> Tensor:
    """The outputs of a whole sequence."""
    rule, (xbc, z, dt) = shape.rule, parts(shape, numbers.double())
    assert isinstance(rule, SelectiveScan)
    channels = rule.num_heads * rule.value_dim
    x, b, c = xbc.split([channels, rule.key_dim, rule.key_dim], dim=1)
    if rule.b_norm is not None and rule.c_norm is not None:
        b, c = _normed(b, rule.b_norm, rule.eps), _normed(c, rule.c_norm, rule.eps)
    rate = rule.decay_rate.transpose(1, 2).reshape(channels, rule.key_dim)
    x, dt, b, c, z = (each.t()[None] for each in (x, dt, b, c, z))
    weights: dict[str, Any] = {"D": rule.skip.double(), "delta_bias": rule.dt_bias.double(), "delta_softplus": True}
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    found: Tensor = mamba_selective_scan(x, dt, rate, b, c, z=z, **weights)
    return found[0].t()


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from transformers.models.jamba.modeling_jamba import JambaRMSNorm

    norm = JambaRMSNorm(len(weight), eps).double()
    norm.weight.data = weight.double()
    return norm(x).detach()


SIZES = [(2, 12, 80), *slow((2, 12, 32), (1, 16, 64), (3, 34, 16))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rules", [{}, {"norm": True}, {"far": 12.0}])
@pytest.mark.parametrize(("heads", "key", "value"), SIZES)
def test_selective_scan_prefill_matches_transformers(
    cpu: CpuBackend, heads: int, key: int, value: int, rules: dict[str, Any], dtype: torch.dtype
) -> None:
    """Time steps near 0 and large ones."""
    generator = torch.Generator().manual_seed(4)
    shape = made(heads, key, value, generator, **rules)
    prompts = [given(shape, length, generator, dtype) for length in (1, 2, 33, 70)]
    for backend in (cpu, ReferenceBackend()):
        rows = [Row(each, 0, 0, len(each), at) for at, each in enumerate(prompts)]
        for got, prompt in zip(Kept(backend, shape, dtype).step(rows), prompts, strict=True):
            assert error(got, expected(shape, prompt)) < TOLERANCE[dtype]


def test_float64_reference_selective_scan_matches_transformers() -> None:
    generator = torch.Generator().manual_seed(4)
    shape = made(4, 12, 16, generator, norm=True)
    prompt = given(shape, 40, generator, torch.float64)
    assert error(whole(ReferenceBackend(), shape, prompt), expected(shape, prompt)) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selective_scan_bits_do_not_depend_on_chunking(cpu: CpuBackend, dtype: torch.dtype) -> None:
    for seed in range(8 if runs_rest() else 2):
        shape = made(2, 12, 80, torch.Generator().manual_seed(2), norm=bool(seed % 2))
        cut_at_random(cpu, shape, dtype, seed)
        cut_at_random(ReferenceBackend(), shape, dtype, seed)


def test_selective_scan_rejects_invalid_slot_drafts_and_shapes(cpu: CpuBackend) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = made(2, 12, 32, generator)
    prompt = given(shape, 20, generator, torch.float32)
    with pytest.raises(IndexError):
        Kept(cpu, shape, torch.float32).step([Row(prompt, 0, 0, 20, SLOTS)])
    with pytest.raises(IndexError, match="draft tokens"):
        Kept(cpu, shape, torch.float32, drafts=3).step([Row(prompt, 0, 0, 16, 0)])
    assert isinstance(shape.rule, SelectiveScan)
    wrong = shape._replace(rule=replace(shape.rule, skip=shape.rule.skip.double()))
    with pytest.raises(TypeError, match="float32"):
        whole(cpu, wrong, prompt)
    odd = made(1, 12, 24, generator)
    with pytest.raises(ValueError, match="multiple of 16"):
        whole(cpu, odd, given(odd, 3, generator, torch.float32))
