"""The gated delta rule, with a decay per head and per key channel, against transformers, token by token. Its bits must
not depend on how sequences are cut, with wrong and right drafts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import error
from tests.kernels.recurrences import SLOTS, Kept, Row, Shape, cut_at_random, given, parts
from tests.tiers import slow

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""transformers' rule computes float64 in float32 too."""


def made(key_heads: int, heads: int, key: int, value: int, generator: torch.Generator, *, kimi: bool = False) -> Shape:
    """kimi: a decay per key channel, and a sigmoid gate."""
    rate = -torch.rand(heads, generator=generator)
    shift, norm = (torch.randn(size, generator=generator) for size in (heads * key if kimi else heads, value))
    return Shape(DeltaRule(rate, shift, norm, 1e-5, key_heads, key, has_sigmoid_gate=kimi), heads, key, value)


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
    b, a = ba[None].split([rule.num_heads, len(rule.dt_bias)], dim=2)
    step = torch.nn.functional.softplus(a + rule.dt_bias.double()).view(1, len(numbers), rule.num_heads, -1)
    decay = rule.decay_rate.double()[:, None] * step
    values = v.view(1, len(numbers), rule.num_heads, rule.value_dim)
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    of_kimi = len(rule.dt_bias) > rule.num_heads
    recurrent = recurrent_kimi_delta_attention if of_kimi else torch_recurrent_gated_delta_rule
    decay = decay if of_kimi else decay[..., 0]
    output, _ = recurrent(q, k, values, decay, b.sigmoid(), None, False, use_qk_l2norm_in_kernel=True)
    normed = torch.nn.functional.rms_norm(output[0].double(), (rule.value_dim,), rule.norm_weight.double(), rule.eps)
    return normed.flatten(1) * (z.sigmoid() if rule.has_sigmoid_gate else torch.nn.functional.silu(z))


def by_definition(shape: Shape, numbers: Tensor) -> Tensor:
    """Kimi Linear's report (2025), equation by equation in float64: Diag(a) decays S, then the delta rule writes."""
    rule, (qkv, z, ba) = shape.rule, parts(shape, numbers.double())
    assert isinstance(rule, DeltaRule)
    heads, key, value, results = rule.num_heads, rule.key_dim, rule.value_dim, []
    state = torch.zeros(heads, key, value).double()
    for x, gate, others in zip(qkv, z, ba, strict=True):
        q, k, v = x.split([heads * key, heads * key, heads * value])
        rows = []
        for h in range(heads):
            q_h, k_h = (
                each.view(heads, key)[h] / (each.view(heads, key)[h].square().sum() + 1e-6).sqrt() for each in (q, k)
            )
            forget = others[heads:].view(heads, key)[h] + rule.dt_bias.double().view(heads, key)[h]
            state[h] = torch.diag((rule.decay_rate[h].double() * (1 + forget.exp()).log()).exp()) @ state[h]
            beta = 1 / (1 + (-others[h]).exp())
            state[h] = (torch.eye(key) - beta * torch.outer(k_h, k_h)) @ state[h]
            state[h] += beta * torch.outer(k_h, v.view(heads, value)[h])
            read = state[h].T @ q_h / key**0.5
            normed = read / (read.square().mean() + rule.eps).sqrt() * rule.norm_weight.double()
            rows.append(normed / (1 + (-gate.view(heads, value)[h]).exp()))
        results.append(torch.cat(rows))
    return torch.stack(results)


SIZES = [(2, 4, 12, 32), (1, 1, 128, 128), *slow((3, 3, 6, 80), (2, 6, 64, 16))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kimi", [False, True])
@pytest.mark.parametrize(("key_heads", "heads", "key", "value"), SIZES)
def test_delta_rule_prefill_matches_transformers(
    cpu: CpuBackend, key_heads: int, heads: int, key: int, value: int, kimi: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(4)
    shape = made(key_heads, heads, key, value, generator, kimi=kimi)
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


def test_kimi_delta_rule_equals_published_definition(cpu: CpuBackend) -> None:
    generator = torch.Generator().manual_seed(6)
    shape = made(3, 3, 12, 32, generator, kimi=True)
    prompt = given(shape, 40, generator, torch.float64)
    for backend, dtype, tolerance in ((ReferenceBackend(), torch.float64, 1e-12), (cpu, torch.float32, 1e-5)):
        asked = prompt.to(dtype)
        (output,) = Kept(backend, shape, dtype).step([Row(asked, 0, 0, 40, 0)])
        assert error(output, by_definition(shape, asked)) < tolerance


@pytest.mark.few(2)
@pytest.mark.parametrize("kimi", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_rule_bits_do_not_depend_on_chunking(cpu: CpuBackend, dtype: torch.dtype, kimi: bool) -> None:
    shape = made(2, 4, 12, 48, torch.Generator().manual_seed(2), kimi=kimi)
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
