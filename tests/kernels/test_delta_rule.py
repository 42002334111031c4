"""The gated delta rule against transformers' own, token by token; and however sequences are cut, with wrong
guesses and right ones, the same bits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from quire.kernels.backend import AttentionMetadata, Backend
from quire.kernels.cpu.backend import Cpu
from quire.kernels.recurrent.delta_rule import DeltaRule, DeltaStates, Guesses
from quire.kernels.reference import Reference
from tests.kernels.ragged import error
from tests.variants import nightly

SLOTS = 5
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""transformers' rule computes float64 in float32 too."""


def made(key_heads: int, heads: int, key: int, value: int, generator: torch.Generator) -> DeltaRule:
    rate = -torch.rand(heads, generator=generator)
    shift, norm = (torch.randn(size, generator=generator) for size in (heads, value))
    return DeltaRule(rate, shift, norm, 1e-5, key_heads, key)


def given(rule: DeltaRule, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """q, k, v, z, b and a of tokens side by side."""
    width = rule.inputs + rule.heads * rule.value + 2 * rule.heads
    return torch.randn((tokens, width), generator=generator).to(dtype)


def parts(rule: DeltaRule, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    qkv, z, ba = numbers.split([rule.inputs, rule.heads * rule.value, 2 * rule.heads], dim=1)
    return qkv, z, ba


def expected(rule: DeltaRule, numbers: Tensor) -> Tensor:
    """Of a whole sequence."""
    qkv, z, ba = parts(rule, numbers.double())
    keys = rule.key_heads * rule.key
    q, k, v = qkv.split([keys, keys, rule.heads * rule.value], dim=1)
    q, k = (each.view(1, len(numbers), rule.key_heads, rule.key) for each in (q, k))
    b, a = ba.view(1, len(numbers), 2, rule.heads).unbind(2)
    decay = rule.rate.double() * torch.nn.functional.softplus(a + rule.shift.double())
    values = v.view(1, len(numbers), rule.heads, rule.value)
    found, _ = torch_recurrent_gated_delta_rule(q, k, values, decay, b.sigmoid(), use_qk_l2norm_in_kernel=True)
    normed = torch.nn.functional.rms_norm(found[0].double(), (rule.value,), rule.norm.double(), rule.eps)
    return normed.flatten(1) * torch.nn.functional.silu(z)


class Row(NamedTuple):
    numbers: Tensor
    """Of the sequence up to the end of what is computed."""
    first: int
    seen: int
    known: int
    slot: int


@dataclass
class Kept:
    """What a layer keeps, NaN where nobody wrote."""

    backend: Backend
    rule: DeltaRule
    dtype: torch.dtype
    drafts: int = 0

    def __post_init__(self) -> None:
        rule, wide = self.rule, torch.float64 if self.dtype == torch.float64 else torch.float32
        matrices = torch.full((SLOTS, rule.heads, rule.key, rule.value), torch.nan, dtype=wide)
        self.states = DeltaStates(matrices, torch.full((SLOTS, self.drafts, rule.kept), torch.nan, dtype=self.dtype))

    def step(self, rows: list[Row]) -> list[Tensor]:
        counts = [len(row.numbers) - row.first for row in rows]
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        lens = torch.tensor([[len(row.numbers), row.seen, row.known] for row in rows], dtype=torch.int32).T.contiguous()
        slots = torch.tensor([row.slot for row in rows])
        unused = torch.zeros((len(rows), 1), dtype=torch.int32)
        where = (starts, lens[0], starts, unused, slots, slots, max(counts), int(lens[0].max()))
        metadata = AttentionMetadata(*where, state_slots=slots, guesses=Guesses(lens[1], lens[2]))
        numbers = torch.cat([row.numbers[row.first :] for row in rows])
        found = self.backend.delta_rule(*parts(self.rule, numbers), self.rule, self.states, metadata)
        return list(found.split(counts))


SIZES = [(2, 4, 12, 32), (1, 1, 128, 128), *nightly((3, 3, 6, 80), (2, 6, 64, 16))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key_heads", "heads", "key", "value"), SIZES)
def test_whole_prompts(cpu: Cpu, key_heads: int, heads: int, key: int, value: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    rule = made(key_heads, heads, key, value, generator)
    prompts = [given(rule, length, generator, dtype) for length in (1, 2, 33, 70)]
    for backend in (cpu, Reference()):
        kept = Kept(backend, rule, dtype)
        rows = [Row(each, 0, 0, len(each), at) for at, each in enumerate(prompts)]
        for got, prompt in zip(kept.step(rows), prompts, strict=True):
            assert error(got, expected(rule, prompt)) < TOLERANCE[dtype]


def test_the_reference_in_float64() -> None:
    generator = torch.Generator().manual_seed(4)
    rule = made(2, 4, 12, 16, generator)
    prompt = given(rule, 40, generator, torch.float64)
    (found,) = Kept(Reference(), rule, torch.float64).step([Row(prompt, 0, 0, 40, 0)])
    assert error(found, expected(rule, prompt)) < TOLERANCE[torch.float64]


def cut_at_random(backend: Backend, rule: DeltaRule, dtype: torch.dtype, seed: int) -> None:
    """Sequences in chunks beside each other, with guesses of which some are right: their results are as all others',
    and the next step begins behind them."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    drafts = rng.randrange(6)
    kept = Kept(backend, rule, dtype, drafts)
    numbers = [given(rule, rng.randrange(20, 80), generator, dtype) for _ in range(3)]
    alone = [Kept(backend, rule, dtype).step([Row(each, 0, 0, len(each), 0)])[0] for each in numbers]
    done, seen, found = [0] * 3, [0] * 3, [each[:0] for each in alone]
    while any(have < len(each) for have, each in zip(done, numbers, strict=True)):
        rows, ends = [], {}
        for at, each in enumerate(numbers):
            if done[at] == len(each) or rng.random() < 0.3:
                continue
            known = min(done[at] + rng.choice([1, 1, 2, 5, 17, 40]), len(each))
            right = rng.randrange(min(drafts, len(each) - known) + 1)
            wrong = given(rule, rng.randrange(drafts - right + 1), generator, dtype)
            rows.append(Row(torch.cat([each[: known + right], wrong]), done[at], seen[at], known, at))
            ends[at] = known, known + right
        if not rows:
            continue
        for row, got in zip(rows, kept.step(rows), strict=True):
            seen[row.slot], end = ends[row.slot]
            found[row.slot] = torch.cat([found[row.slot], got[: end - row.first]])
            done[row.slot] = end
    for at, got in enumerate(found):
        assert torch.equal(got, alone[at]), f"sequence {at}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_however_it_is_cut_the_bits_are_the_same(cpu: Cpu, dtype: torch.dtype) -> None:
    rule = made(2, 4, 12, 48, torch.Generator().manual_seed(2))
    for seed in range(12):
        cut_at_random(cpu, rule, dtype, seed)
        cut_at_random(Reference(), rule, dtype, seed)


def test_what_lies_outside_is_refused(cpu: Cpu) -> None:
    generator = torch.Generator().manual_seed(1)
    rule = made(2, 4, 12, 32, generator)
    prompt = given(rule, 20, generator, torch.float32)
    for backend in (cpu, Reference()):
        with pytest.raises(IndexError):
            Kept(backend, rule, torch.float32).step([Row(prompt, 0, 0, 20, SLOTS)])
        with pytest.raises(IndexError, match="more guesses than"):
            Kept(backend, rule, torch.float32, drafts=3).step([Row(prompt, 0, 0, 16, 0)])
        with pytest.raises(IndexError, match="more guesses than"):
            Kept(backend, rule, torch.float32, drafts=3).step([Row(prompt, 10, 6, 20, 0)])
    with pytest.raises(TypeError, match="cannot serve"):
        Kept(cpu, rule, torch.bfloat16).step([Row(prompt, 0, 0, 20, 0)])
