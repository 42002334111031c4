"""Short convolutions against direct float64 sums. Their bits must not depend on how sequences are cut."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Backend
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import error
from tests.tiers import slow

CPU = torch.device("cpu")
PIECE, SLOTS, PAGES = 16, 5, 40
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 2e-2}


def made(channels: int, width: int, *, bias: bool, generator: torch.Generator, gated: bool = True) -> ShortConv:
    weight = torch.randn((width, channels), generator=generator)
    return ShortConv(weight, torch.randn(channels, generator=generator) if bias else None, gated)


def on(conv: ShortConv, device: torch.device) -> ShortConv:
    return replace(conv, weight=conv.weight.to(device), bias=None if conv.bias is None else conv.bias.to(device))


def expected(bcx: Tensor, conv: ShortConv) -> Tensor:
    """The outputs of a whole sequence."""
    b, c, x = bcx.double().chunk(3, -1) if conv.is_gated else (bcx, None, bcx.double())
    fresh = x if c is None else (b * x).to(bcx.dtype).double()
    columns = torch.nn.functional.pad(fresh, (0, 0, conv.conv_width - 1, 0))
    total = sum(conv.weight[tap].double() * columns[tap : tap + len(bcx)] for tap in range(conv.conv_width))
    whole = total if conv.bias is None else total + conv.bias.double()
    return torch.nn.functional.silu(whole) if c is None else c * whole


@dataclass
class Kept:
    """The states of a layer, NaN until written, and the pool of free pages."""

    backend: Backend
    conv: ShortConv
    dtype: torch.dtype
    device: torch.device = CPU
    drafts: int = 0
    pieces: int = 1
    paged: bool = True
    free: list[int] = field(default_factory=lambda: random.Random(3).sample(range(PAGES), PAGES))

    def __post_init__(self) -> None:
        width, channels = self.conv.weight.shape
        kind = {"dtype": self.dtype, "device": self.device}
        ends = torch.full((PAGES, self.pieces, width - 1, channels), torch.nan, **kind)
        recent = torch.full((SLOTS, width - 1 + self.drafts, channels), torch.nan, **kind)
        self.columns = ConvStates(ends if self.paged else None, PIECE, recent)

    def pages(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // (PIECE * self.pieces)))]

    def step(self, rows: list[tuple[Tensor, int, list[int], int]]) -> list[Tensor]:
        """Each row: a sequence's inputs up to the end of what is computed, the first position to compute, pages, and
        slot.
        """
        counts = [len(bcx) - first for bcx, first, _, _ in rows]
        table = torch.zeros((len(rows), max(len(pages) for *_, pages, _ in rows)), dtype=torch.int32)
        for at, (*_, pages, _) in enumerate(rows):
            table[at, : len(pages)] = torch.tensor(pages)
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        contexts = torch.tensor([len(bcx) for bcx, *_ in rows], dtype=torch.int32)
        positions = torch.cat([torch.arange(first, len(bcx)) for bcx, first, *_ in rows])
        slots = torch.tensor([slot for *_, slot in rows])
        given = torch.cat([bcx[first:] for bcx, first, *_ in rows])
        tensors = (starts, contexts, starts, table, positions, positions, slots, given)
        *where, slots, given = (each.to(self.device) for each in tensors)
        sizes = {"max_query_len": max(counts), "max_context_len": int(contexts.max()), "state_slots": slots}
        output = self.backend.short_conv(given, self.conv, self.columns, AttentionMetadata(*where, **sizes))
        return list(output.cpu().split(counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("channels", "width", "bias"), [(64, 3, False), (200, 4, True), *slow((7, 2, True))])
def test_short_conv_prefill_matches_float64(
    cpu: CpuBackend, channels: int, width: int, bias: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(4)
    conv = made(channels, width, bias=bias, generator=generator)
    prompts = [torch.randn((length, 3 * channels), generator=generator).to(dtype) for length in (1, 2, 33, 16, 200)]
    for backend in (cpu, ReferenceBackend()):
        kept = Kept(backend, conv, dtype)
        output = kept.step([(each, 0, kept.pages(len(each)), at) for at, each in enumerate(prompts)])
        for got, prompt in zip(output, prompts, strict=True):
            assert error(got, expected(prompt, conv)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ungated_short_conv_without_blocks_matches_float64(cpu: CpuBackend, dtype: torch.dtype) -> None:
    """Computed in chunks, with wrong drafts."""
    generator = torch.Generator().manual_seed(5)
    conv = made(70, 4, bias=False, generator=generator, gated=False)
    prompt = torch.randn((75, 70), generator=generator).to(dtype)
    for backend in (cpu, ReferenceBackend()):
        whole = Kept(backend, conv, dtype, paged=False).step([(prompt, 0, [0], 1)])[0]
        assert error(whole, expected(prompt, conv)) < TOLERANCE[dtype]
        for drafts in (0, 3):
            kept, done, output = Kept(backend, conv, dtype, drafts=drafts, paged=False), 0, whole[:0]
            for count in (1, 1, 2, 3, 20, 1, 14, 30, 3):
                wrong = torch.randn((drafts, 70), generator=generator).to(dtype)
                (got,) = kept.step([(torch.cat([prompt[: done + count], wrong]), done, [0], 2)])
                output, done = torch.cat([output, got[:count]]), done + count
            assert torch.equal(output, whole)


def test_float64_reference_short_conv_matches_direct_sum() -> None:
    generator = torch.Generator().manual_seed(4)
    conv = made(24, 3, bias=True, generator=generator)
    prompt = torch.randn((50, 72), generator=generator, dtype=torch.float64)
    kept = Kept(ReferenceBackend(), conv, torch.float64)
    (output,) = kept.step([(prompt, 0, kept.pages(50), 0)])
    assert error(output, expected(prompt, conv)) < TOLERANCE[torch.float64]


def cut_at_random(
    backend: Backend,
    conv: ShortConv,
    dtype: torch.dtype,
    seed: int,
    pieces: int = 1,
    device: torch.device = CPU,
) -> None:
    """Compute sequences together in random chunks with wrong drafts. One begins with pages of another, in the same step
    or a later one.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    channels, drafts = conv.weight.shape[1], rng.randrange(5)
    kept = Kept(backend, conv, dtype, device, drafts, pieces)
    numbers = [torch.randn((rng.randrange(20, 90), 3 * channels), generator=generator).to(dtype) for _ in range(3)]
    shared = PIECE * pieces * (len(numbers[0]) // (PIECE * pieces))
    numbers.append(torch.cat([numbers[0][:shared], numbers[1][:13]]))
    alone = []
    for each in numbers:
        own = Kept(backend, conv, dtype, device, 0, pieces)
        alone += own.step([(each, 0, own.pages(len(each)), 0)])
    tables = [kept.pages(len(each) + drafts) for each in numbers]
    tables[3][: shared // (PIECE * pieces)] = tables[0][: shared // (PIECE * pieces)]
    done, output = [0, 0, 0, shared], [numbers[0][:0, :channels] for _ in numbers]
    while any(have < len(each) for have, each in zip(done, numbers, strict=True)):
        rows, ends = [], {}
        for at, each in enumerate(numbers):
            if (at == 3 and done[0] < shared and (0 not in ends or ends[0] < shared)) or rng.random() < 0.3:
                continue
            if (end := min(done[at] + rng.choice([1, 1, 2, 5, 17, 40]), len(each))) > done[at]:
                wrong = torch.randn((rng.randrange(drafts + 1), 3 * channels), generator=generator).to(dtype)
                rows.append((torch.cat([each[:end], wrong]), done[at], tables[at], at))
                ends[at] = end
        if not rows:
            continue
        for (_, first, _, at), got in zip(rows, kept.step(rows), strict=True):
            output[at] = torch.cat([output[at], got[: ends[at] - first]])
            done[at] = ends[at]
    for at, got in enumerate(output):
        assert torch.equal(got, alone[at][len(alone[at]) - len(got) :]), f"sequence {at}"


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_short_conv_bits_do_not_depend_on_chunking(cpu: CpuBackend, width: int, dtype: torch.dtype) -> None:
    conv = made(70, width, bias=width == 4, generator=torch.Generator().manual_seed(width))
    for seed in range(12):
        cut_at_random(cpu, conv, dtype, seed)
        cut_at_random(ReferenceBackend(), conv, dtype, seed, pieces=1 + seed % 3)


def test_short_conv_rejects_invalid_block_slot_and_dtype(cpu: CpuBackend) -> None:
    conv = made(64, 3, bias=False, generator=torch.Generator().manual_seed(1))
    kept, prompt = Kept(cpu, conv, torch.float32), torch.randn((20, 192))
    with pytest.raises(IndexError, match="slot points"):
        kept.step([(prompt, 0, [3, PAGES], 0)])
    with pytest.raises(IndexError, match="slot points"):
        kept.step([(prompt, 0, [3, 4], SLOTS)])
    with pytest.raises(TypeError, match="cannot serve"):
        Kept(cpu, conv, torch.bfloat16).step([(prompt, 0, [3, 4], 0)])
