"""LoRA on Triton linears: close to merged weights, and the same bits for a row whatever rows and adapters share its
batch.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS, AdapterSlotSpec, LinearContext, LoraDelta
from quire.kernels.gpu.linears.triton_linear import pack_linear
from quire.kernels.gpu.linears.triton_lora import TritonLinearWithLora
from tests.kernels.ragged import error

PARTS = (48, 16, 130)
"""Outputs: less than a block, and more than two."""
RANKS = (1, 5, 16, 64, 256)
SLOTS = len(RANKS) + 1
"""The last slot stays empty."""
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def deltas(rank: int, inner: int, dtype: torch.dtype, generator: torch.Generator) -> list[LoraDelta]:
    """Deltas of the first and the last part; the middle part has none."""
    lora_deltas = []
    for first, outs in ((0, PARTS[0]), (PARTS[0] + PARTS[1], PARTS[2])):
        down, up = (torch.randn(s, generator=generator) * s[1] ** -0.5 for s in ((rank, inner), (outs, rank)))
        lora_deltas.append(LoraDelta(first, down.to(dtype), up.to(dtype)))
    return lora_deltas


class LoraFixture:
    def __init__(
        self,
        inner: int,
        dtype: torch.dtype,
        device: torch.device,
        generator: torch.Generator,
        *,
        wide: bool = False,
        **options: int,
    ) -> None:
        self.weight = torch.randn((sum(PARTS), inner), generator=generator).to(device, dtype)
        self.plain = pack_linear(self.weight, None, wide=wide)
        slots = AdapterSlotSpec(SLOTS, inner, PARTS, max(RANKS), dtype, wide, device)
        self.linear = TritonLinearWithLora(self.plain, slots, **options)
        self.deltas = [deltas(rank, inner, dtype, generator) for rank in RANKS]
        for slot, own in enumerate(self.deltas, 1):
            self.linear.put_adapter(slot, self.linear.pack_one_adapter(own))

    def expected(self, x: Tensor, adapters: Tensor) -> Tensor:
        """Computed in float64 with merged weights."""
        out = []
        for row, slot in zip(x.cpu().double(), adapters.tolist(), strict=True):
            merged = self.weight.cpu().double()
            for delta in self.deltas[slot - 1] if 0 < slot <= len(self.deltas) else []:
                merged[delta.first_output : delta.first_output + len(delta.up)] += (
                    delta.up.double() @ delta.down.double()
                )
            out.append(merged @ row)
        return torch.stack(out)


def lora_context(adapters: Tensor) -> LinearContext:
    return LinearContext(adapters, torch.argsort(adapters, stable=True))


@pytest.mark.parametrize(("dtype", "wide"), [*((dtype, False) for dtype in TOLERANCE), (torch.bfloat16, True)])
@pytest.mark.parametrize("inner", [70, 64])
def test_linear_with_lora_matches_merged_weights(
    inner: int, dtype: torch.dtype, wide: bool, device: torch.device, generator: torch.Generator
) -> None:
    fixture = LoraFixture(inner, dtype, device, generator, wide=wide)
    x = torch.randn((53, inner), generator=generator).to(device, dtype)
    adapters = torch.randint(0, SLOTS + 1, (53,), generator=generator).to(device)
    got = fixture.linear(x, lora_context(adapters))
    assert got.dtype == (torch.float32 if wide else dtype)
    assert error(got.cpu(), fixture.expected(x, adapters)) < TOLERANCE[dtype]


def test_lora_with_split_inputs_matches_merged_weights(device: torch.device, generator: torch.Generator) -> None:
    """Partial sums over 64 inputs, the last over fewer."""
    fixture = LoraFixture(200, torch.float32, device, generator, split=64)
    x = torch.randn((9, 200), generator=generator).to(device)
    adapters = torch.tensor([4, 1, 0, 2, 2, 6, 3, 5, 4], device=device)
    assert error(fixture.linear(x, lora_context(adapters)).cpu(), fixture.expected(x, adapters)) < 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_row_bits_do_not_depend_on_batch(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    """Compares a batch, another order, and each row alone. Rows without an adapter equal the plain linear."""
    fixture = LoraFixture(70, dtype, device, generator)
    x = torch.randn((19, 70), generator=generator).to(device, dtype)
    adapters = torch.randint(0, SLOTS + 1, (19,), generator=generator).to(device)
    alone = torch.cat([fixture.linear(x[i : i + 1], lora_context(adapters[i : i + 1])) for i in range(19)])
    order = torch.randperm(19, generator=generator).to(device)
    assert torch.equal(fixture.linear(x, lora_context(adapters)), alone)
    assert torch.equal(fixture.linear(x[order], lora_context(adapters[order])), alone[order])
    plain = fixture.plain(x, NO_ADAPTERS)
    none = (adapters == 0) | (adapters == SLOTS)
    assert none.any()
    assert torch.equal(alone[none], plain[none])
    assert not torch.equal(alone, plain)
    assert torch.equal(fixture.linear(x, NO_ADAPTERS), plain)
    assert fixture.linear(x[:0], lora_context(adapters[:0])).shape == (0, sum(PARTS))


def test_lora_serves_different_adapter_per_row(device: torch.device, generator: torch.Generator) -> None:
    """There are more adapters than a tile has rows."""
    inner, count = 32, 20
    weight = torch.randn((48, inner), generator=generator).to(device)
    slots = AdapterSlotSpec(count, inner, (48,), 8, torch.float32, False, device)
    linear = TritonLinearWithLora(pack_linear(weight, None), slots)
    halves = []
    for slot in range(1, count + 1):
        down, up = torch.randn((8, inner), generator=generator), torch.randn((48, 8), generator=generator)
        halves.append((down, up))
        linear.put_adapter(slot, linear.pack_one_adapter([LoraDelta(0, down, up)]))
    adapters = torch.cat([torch.randperm(count, generator=generator) + 1, torch.zeros(5, dtype=torch.int64)])
    x = torch.randn((len(adapters), inner), generator=generator)
    merged = [weight.cpu().double(), *(weight.cpu().double() + up.double() @ down.double() for down, up in halves)]
    expected = torch.stack([merged[slot] @ row for slot, row in zip(adapters.tolist(), x.double(), strict=True)])
    assert error(linear(x.to(device), lora_context(adapters.to(device))).cpu(), expected) < 3e-6


def test_adapter_slots_are_reusable(device: torch.device, generator: torch.Generator) -> None:
    """A larger rank, a smaller one and none replace other adapters; nothing of the replaced ones remains."""
    fixture = LoraFixture(70, torch.float32, device, generator)
    x = torch.randn((5, 70), generator=generator).to(device)
    for slot, other in ((1, 3), (5, 1)):
        fixture.linear.put_adapter(slot, fixture.linear.pack_one_adapter(fixture.deltas[other]))
    fixture.linear.put_adapter(2, None)
    fixture.linear.put_adapter(3, fixture.linear.pack_one_adapter(fixture.deltas[2][1:]))
    got = fixture.linear(x, lora_context(torch.tensor([1, 2, 5, 3, 0], device=device))).cpu()
    assert error(got[:3], fixture.expected(x[:3], torch.tensor([4, 0, 2]))) < 3e-6
    plain = F.linear(x[3], fixture.weight).cpu()
    assert torch.allclose(got[3, : PARTS[0]], plain[: PARTS[0]], atol=1e-4), "the first part has none any more"
    assert not torch.allclose(got[3, -PARTS[2] :], plain[-PARTS[2] :], atol=1e-4)
