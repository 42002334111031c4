"""LoRA on CPU linears: close to merged weights, and the same bits for a row with any other rows and adapters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS, AdapterSlotSpec, Backend, LinearContext, LinearWithLora, LoraDelta
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.cpu.lora import CompiledLinearWithLora
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import error

IN, PARTS = 70, (48, 16, 33)
"""Features. The parts' outputs do not fill whole panels."""
RANKS = (1, 5, 16, 64, 256)
SLOTS = len(RANKS) + 1
"""The last slot stays empty."""
CPU = torch.device("cpu")


def deltas(rank: int, dtype: torch.dtype, generator: torch.Generator) -> list[LoraDelta]:
    """Deltas of the first and the last part; the middle part has none."""
    lora_deltas = []
    for first, outs in ((0, PARTS[0]), (PARTS[0] + PARTS[1], PARTS[2])):
        down, up = (torch.randn(s, generator=generator) * s[1] ** -0.5 for s in ((rank, IN), (outs, rank)))
        lora_deltas.append(LoraDelta(first, down.to(dtype), up.to(dtype)))
    return lora_deltas


def make_linear_with_lora(
    backend: Backend, dtype: torch.dtype, generator: torch.Generator, *, wide: bool = False
) -> tuple[LinearWithLora, Tensor, list[list[LoraDelta]]]:
    weight = torch.randn((sum(PARTS), IN), generator=generator).to(dtype)
    slots = AdapterSlotSpec(SLOTS, IN, PARTS, max(RANKS), dtype, wide, CPU)
    linear = backend.make_linear_with_lora(backend.pack_linear(weight, None, wide=wide), slots)
    each = [deltas(rank, dtype, generator) for rank in RANKS]
    for slot, own in enumerate(each, 1):
        linear.put_adapter(slot, linear.pack_one_adapter(own))
    return linear, weight, each


def expected(x: Tensor, weight: Tensor, each: list[list[LoraDelta]], adapters: Tensor) -> Tensor:
    """Computed in float64 with merged weights."""
    out = []
    for row, slot in zip(x.double(), adapters.tolist(), strict=True):
        merged = weight.double().clone()
        for delta in each[slot - 1] if 0 < slot <= len(each) else []:
            merged[delta.first_output : delta.first_output + len(delta.up)] += delta.up.double() @ delta.down.double()
        out.append(merged @ row)
    return torch.stack(out)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_with_lora_matches_merged_weights(
    cpu: CpuBackend, dtype: torch.dtype, wide: bool, generator: torch.Generator
) -> None:
    linear, weight, each = make_linear_with_lora(cpu, dtype, generator, wide=wide)
    x = torch.randn((53, IN), generator=generator).to(dtype)
    adapters = torch.randint(0, SLOTS + 1, (53,), generator=generator)
    got = linear(x, LinearContext(adapters))
    assert isinstance(linear, CompiledLinearWithLora)
    assert got.dtype == (torch.float32 if wide else dtype)
    assert error(got, expected(x, weight, each, adapters)) < (8e-3 if got.dtype == torch.bfloat16 else 2e-6)


def test_reference_linear_with_lora_matches_merged_weights(generator: torch.Generator) -> None:
    linear, weight, each = make_linear_with_lora(ReferenceBackend(), torch.float32, generator)
    x = torch.randn((21, IN), generator=generator)
    adapters = torch.randint(0, SLOTS + 1, (21,), generator=generator)
    assert error(linear(x, LinearContext(adapters)), expected(x, weight, each, adapters)) < 2e-6


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_row_bits_do_not_depend_on_batch_or_threads(
    cpu: CpuBackend, dtype: torch.dtype, threads: int, generator: torch.Generator, keep_threads: None
) -> None:
    """Compares a batch, another order, and each row alone. Rows without an adapter equal the plain linear."""
    linear, weight, _ = make_linear_with_lora(cpu, dtype, generator)
    x = torch.randn((64, IN), generator=generator).to(dtype)
    adapters = torch.randint(0, SLOTS + 1, (64,), generator=generator)
    torch.set_num_threads(1)
    alone = torch.cat([linear(x[i : i + 1], LinearContext(adapters[i : i + 1])) for i in range(64)])
    torch.set_num_threads(threads)
    order = torch.randperm(64, generator=generator)
    assert torch.equal(linear(x, LinearContext(adapters)), alone)
    assert torch.equal(linear(x[order], LinearContext(adapters[order])), alone[order])
    plain = cpu.pack_linear(weight, None)(x, NO_ADAPTERS)
    none = (adapters == 0) | (adapters == SLOTS)
    assert none.any()
    assert torch.equal(alone[none], plain[none])
    assert not torch.equal(alone, plain)
    assert torch.equal(linear(x, NO_ADAPTERS), plain)


def test_adapter_slots_are_reusable(cpu: CpuBackend, generator: torch.Generator) -> None:
    linear, weight, each = make_linear_with_lora(cpu, torch.float32, generator)
    x = torch.randn((4, IN), generator=generator)
    adapters = torch.tensor([1, 2, 1, 0])
    linear.put_adapter(1, linear.pack_one_adapter(each[3]))
    linear.put_adapter(2, None)
    got = linear(x, LinearContext(adapters))
    assert error(got, expected(x, weight, each, torch.tensor([4, 0, 4, 0]))) < 2e-6
