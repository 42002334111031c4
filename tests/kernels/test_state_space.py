"""Selective state spaces against transformers' chunked scan. Their bits must not depend on how sequences are cut, with
wrong and right drafts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.recurrent.state_space import StateSpace
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import error
from tests.kernels.recurrences import SLOTS, Kept, Row, Shape, cut_at_random, given, parts, whole
from tests.tiers import slow

TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""transformers' scan computes float64 in float32 too."""


def made(groups: int, heads: int, key: int, value: int, generator: torch.Generator, **rules: Any) -> Shape:
    """`norm`: whether the rule has a norm."""
    rate = -torch.rand(heads, generator=generator)
    shift, skip = (torch.randn(heads, generator=generator) for _ in range(2))
    norm = torch.randn(heads * value, generator=generator) if rules.pop("norm", True) else None
    return Shape(StateSpace(rate, shift, skip, norm, 1e-5, groups, key, value, **rules), heads, key, value)


def expected(shape: Shape, numbers: Tensor) -> Tensor:
    """The outputs of a whole sequence."""
    rule, (xbc, z, dt) = shape.rule, parts(shape, numbers.double())
    assert isinstance(rule, StateSpace)
    keys, length = rule.num_groups * rule.key_dim, len(numbers)
    x, b, c = xbc.split([rule.num_heads * rule.value_dim, keys, keys], dim=1)
    x, b, c = x.view(1, length, rule.num_heads, -1), *(each.view(1, length, rule.num_groups, -1) for each in (b, c))
    weights = {"D": rule.skip, "dt_bias": rule.dt_bias.double(), "dt_softplus": True, "dt_limit": rule.dt_limits}
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    scanned = mamba2_chunk_scan(x, dt[None], rule.decay_rate, b, c, chunk_size=16, **weights)
    found = scanned.reshape(length, -1).double()
    if rule.norm_weight is None:
        return found * torch.nn.functional.silu(z)
    norm = FalconH1RMSNormGated(len(rule.norm_weight), rule.eps, rule.num_groups, rule.norm_before_gate).double()
    norm.weight.data = rule.norm_weight.double()
    return norm(found[None], z[None])[0].detach()


RULES: list[dict[str, Any]] = [
    {},
    {"norm": False, "dt_limits": (0.3, 1.1)},
    {"norm_before_gate": True},
    *slow({"norm": False}, {"dt_limits": (0.0, 0.8)}),
]
SIZES = [(2, 4, 12, 32), (1, 2, 128, 64), *slow((3, 3, 6, 80), (2, 6, 64, 16))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize(("groups", "heads", "key", "value"), SIZES)
def test_state_space_prefill_matches_transformers(
    cpu: CpuBackend, groups: int, heads: int, key: int, value: int, rules: dict[str, Any], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(4)
    shape = made(groups, heads, key, value, generator, **rules)
    prompts = [given(shape, length, generator, dtype) for length in (1, 2, 33, 70)]
    for backend in (cpu, ReferenceBackend()):
        rows = [Row(each, 0, 0, len(each), at) for at, each in enumerate(prompts)]
        for got, prompt in zip(Kept(backend, shape, dtype).step(rows), prompts, strict=True):
            assert error(got, expected(shape, prompt)) < TOLERANCE[dtype]


def test_float64_reference_state_space_matches_transformers() -> None:
    generator = torch.Generator().manual_seed(4)
    shape = made(2, 4, 12, 16, generator)
    prompt = given(shape, 40, generator, torch.float64)
    assert error(whole(ReferenceBackend(), shape, prompt), expected(shape, prompt)) < TOLERANCE[torch.float64]


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_space_bits_do_not_depend_on_chunking(cpu: CpuBackend, dtype: torch.dtype) -> None:
    for seed in range(12):
        shape = made(2, 4, 12, 48, torch.Generator().manual_seed(2), **RULES[seed % 3])
        cut_at_random(cpu, shape, dtype, seed)
        cut_at_random(ReferenceBackend(), shape, dtype, seed)


def test_state_space_rejects_invalid_slot_drafts_and_shapes(cpu: CpuBackend) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = made(2, 4, 12, 32, generator)
    prompt = given(shape, 20, generator, torch.float32)
    with pytest.raises(IndexError):
        Kept(cpu, shape, torch.float32).step([Row(prompt, 0, 0, 20, SLOTS)])
    with pytest.raises(IndexError, match="draft tokens"):
        Kept(cpu, shape, torch.float32, drafts=3).step([Row(prompt, 0, 0, 16, 0)])
    assert isinstance(shape.rule, StateSpace)
    wrong = shape._replace(rule=replace(shape.rule, skip=shape.rule.skip.double()))
    with pytest.raises(TypeError, match="float32"):
        whole(cpu, wrong, prompt)
    odd = made(1, 2, 12, 24, generator)
    with pytest.raises(ValueError, match="multiple of 16"):
        whole(cpu, odd, given(odd, 3, generator, torch.float32))
