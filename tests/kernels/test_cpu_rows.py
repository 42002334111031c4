"""Linears of the CPU backend prepare the rows of x once for all panels, and large batches a part at a time."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from threading import Thread

import pytest
import torch

from quire.kernels.backend import NO_ADAPTERS, Linear
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight

INNER = 4096
KINDS = ["bfloat16", "8 bits", "8-bit floats"]


def make_linear(cpu: CpuBackend, kind: str, outs: int, generator: torch.Generator) -> Linear:
    match kind:
        case "8 bits":
            codes = torch.randint(-128, 128, (outs, INNER), generator=generator, dtype=torch.int8)
            weight = GroupedWeight(codes, torch.full((outs, 1), 0.01))
            return cpu.pack_quantized([weight], None, dtype=torch.bfloat16)
        case "8-bit floats":
            floats = torch.randn((outs, INNER), generator=generator).to(torch.float8_e4m3fn)
            return cpu.pack_quantized(
                [Float8Weight(floats, torch.ones(1, 1), (outs, INNER))], None, dtype=torch.bfloat16
            )
    return cpu.pack_linear(torch.randn((outs, INNER), generator=generator).bfloat16(), None)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_row_bits_do_not_depend_on_slice(cpu: CpuBackend, kind: str, generator: torch.Generator) -> None:
    linear = make_linear(cpu, kind, 10, generator)
    x = torch.randn((900, INNER), generator=generator).bfloat16()
    whole = linear(x, NO_ADAPTERS)
    for begin, end in [(0, 1), (299, 301), (383, 385), (449, 451), (899, 900)]:
        assert torch.equal(linear(x[begin:end], NO_ADAPTERS), whole[begin:end]), begin


def resident_bytes() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.few(2)
@pytest.mark.skipif(sys.platform != "linux", reason="asks how much memory there is as Linux tells it")
@pytest.mark.parametrize("kind", KINDS)
def test_linear_memory_is_bounded_for_many_rows(cpu: CpuBackend, kind: str, generator: torch.Generator) -> None:
    """`quire plan` does not count this memory: 4,096 rows would take 64 MB as float32 and 36 MB as codes."""
    linear, x, grown = make_linear(cpu, kind, 10, generator), torch.ones((4096, INNER), dtype=torch.bfloat16), []

    def run() -> None:  # a new thread has no buffers of earlier calls
        before = resident_bytes()
        linear(x, NO_ADAPTERS)
        grown.append(resident_bytes() - before)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    assert grown[0] < 20 << 20
