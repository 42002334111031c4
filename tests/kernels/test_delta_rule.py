"""The gated delta rule against transformers, token by token. Its bits must not depend on how sequences are cut, with
wrong and right drafts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import error
from tests.kernels.recurrences import SLOTS, Kept, Row, Shape, cut_at_random, given, parts
from tests.tiers import slow

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""transformers' rule computes float64 in float32 too."""


def made(key_heads: int, heads: int, key: int, value: int, generator: torch.Generator) -> Shape:
    rate = -torch.rand(heads, generator=generator)
    shift, norm = (torch.randn(size, generator=generator) for size in (heads, value))
    return Shape(DeltaRule(rate, shift, norm, 1e-5, key_heads, key), heads, key, value)


def expected(shape: Shape, numbers: Tensor) -> Tensor:
    """The outputs of a whole sequence."""
    rule, (qkv, z, ba) = shape.rule, parts(shape, numbers.double())
    assert isinstance(rule, DeltaRule)
    keys = rule.num_key_heads * rule.key_dim
    q, k, v = qkv.split([keys, keys, rule.num_heads * rule.value_dim], dim=1)
    q, k = (each.view(1, len(numbers), rule.num_key_heads, rule.key_dim) for each in (q, k))
    q, k = (
        each.repeat_interleave(rule.num_heads // rule.num_key_heads, 2) for each in (q, k)
    )  # later transformers do so
    b, a = ba.view(1, len(numbers), 2, rule.num_heads).unbind(2)
    decay = rule.decay_rate.double() * torch.nn.functional.softplus(a + rule.dt_bias.double())
    values = v.view(1, len(numbers), rule.num_heads, rule.value_dim)
    output, _ = torch_recurrent_gated_delta_rule(q, k, values, decay, b.sigmoid(), use_qk_l2norm_in_kernel=True)
    normed = torch.nn.functional.rms_norm(output[0].double(), (rule.value_dim,), rule.norm_weight.double(), rule.eps)
    return normed.flatten(1) * torch.nn.functional.silu(z)


SIZES = [(2, 4, 12, 32), (1, 1, 128, 128), *slow((3, 3, 6, 80), (2, 6, 64, 16))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key_heads", "heads", "key", "value"), SIZES)
def test_delta_rule_prefill_matches_transformers(
    cpu: CpuBackend, key_heads: int, heads: int, key: int, value: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(4)
    shape = made(key_heads, heads, key, value, generator)
    prompts = [given(shape, length, generator, dtype) for length in (1, 2, 33, 70)]
    for backend in (cpu, ReferenceBackend()):
        kept = Kept(backend, shape, dtype)
        rows = [Row(each, 0, 0, len(each), at) for at, each in enumerate(prompts)]
        for got, prompt in zip(kept.step(rows), prompts, strict=True):
            assert error(got, expected(shape, prompt)) < TOLERANCE[dtype]


def test_float64_reference_delta_rule_matches_transformers() -> None:
    generator = torch.Generator().manual_seed(4)
    shape = made(2, 4, 12, 16, generator)
    prompt = given(shape, 40, generator, torch.float64)
    (output,) = Kept(ReferenceBackend(), shape, torch.float64).step([Row(prompt, 0, 0, 40, 0)])
    assert error(output, expected(shape, prompt)) < TOLERANCE[torch.float64]


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_rule_bits_do_not_depend_on_chunking(cpu: CpuBackend, dtype: torch.dtype) -> None:
    shape = made(2, 4, 12, 48, torch.Generator().manual_seed(2))
    for seed in range(12):
        cut_at_random(cpu, shape, dtype, seed)
        cut_at_random(ReferenceBackend(), shape, dtype, seed)


def test_delta_rule_rejects_invalid_slot_drafts_and_dtype(cpu: CpuBackend) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = made(2, 4, 12, 32, generator)
    prompt = given(shape, 20, generator, torch.float32)
    for backend in (cpu, ReferenceBackend()):
        with pytest.raises(IndexError):
            Kept(backend, shape, torch.float32).step([Row(prompt, 0, 0, 20, SLOTS)])
        with pytest.raises(IndexError, match="draft tokens"):
            Kept(backend, shape, torch.float32, drafts=3).step([Row(prompt, 0, 0, 16, 0)])
        with pytest.raises(IndexError, match="draft tokens"):
            Kept(backend, shape, torch.float32, drafts=3).step([Row(prompt, 10, 6, 20, 0)])
    with pytest.raises(TypeError, match="cannot serve"):
        Kept(cpu, shape, torch.bfloat16).step([Row(prompt, 0, 0, 20, 0)])
