"""Quantized weights' products against bfloat16's, in processor time of one thread, which other load affects less:
`python -m benchmarks.products [--shapes 3072x576 576x1536] [--rows 1 8 32 512] [--copies 8]`

Kinds take turns; shown is the time that 10 % of runs beat. With many `--copies`, few rows read weights from memory;
with one, from caches.
"""

from __future__ import annotations

import time

import torch

from benchmarks.common.options import options
from quire.kernels.backend import NO_ADAPTERS, Linear
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.quantized_tensors import Float8Weight, GroupedWeight

SHAPES = ("960x576", "576x576", "3072x576", "576x1536")
KINDS: dict[str, tuple[int, int, bool] | int | None] = {
    "bfloat16": None,
    "8 bits": (8, 0, False),
    "8 bits, groups of 32": (8, 32, False),
    "4 bits, groups of 32": (4, 32, False),
    "the same with offsets": (4, 32, True),
    "8-bit floats": 128,
}
"""Tuples: bits, inputs per group (0: all), offsets. An integer: outputs and inputs per block of FP8."""


def make(cpu: CpuBackend, kind: tuple[int, int, bool] | int | None, outs: int, inner: int) -> Linear:
    if kind is None:
        return cpu.pack_linear(torch.randn(outs, inner).bfloat16() * 0.03, None)
    if isinstance(kind, int):
        floats = (torch.randn(outs, inner) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        blocks = torch.rand(-(-outs // kind), -(-inner // kind)) * 1e-4 + 1e-4
        return cpu.pack_quantized([Float8Weight(floats, blocks, (kind, kind))], None, dtype=torch.bfloat16)
    bits, group, offsets = kind
    codes = torch.randint(0, 256, (outs, inner * bits // 8), dtype=torch.uint8)
    scales = torch.rand(outs, inner // group if group else 1) * 0.01 + 0.001
    codes = codes.view(torch.int8) if bits == 8 else codes
    weight = GroupedWeight(codes, scales, scales.clone() if offsets else None)
    return cpu.pack_quantized([weight], None, dtype=torch.bfloat16)


def measure(linears: dict[str, list[Linear]], inputs: dict[int, torch.Tensor], turns: int) -> dict[str, float]:
    """Seconds by kind."""
    times: dict[str, list[float]] = {kind: [] for kind in linears}
    for _ in range(turns):
        for kind, each in linears.items():
            begin = time.thread_time()
            for linear in each:
                linear(inputs[linear.in_features], NO_ADAPTERS)  # type: ignore[attr-defined]
            times[kind].append(time.thread_time() - begin)
    return {kind: sorted(taken)[len(taken) // 10] for kind, taken in times.items()}


def main() -> None:
    shapes = {"nargs": "+", "default": SHAPES, "help": "outputs x inputs"}
    args = options(__doc__, {"--shapes": shapes, "--rows": {"nargs": "+", "default": (1, 8, 32, 512)}, "--copies": 8})
    torch.set_num_threads(1)
    cpu = CpuBackend()
    sizes = [tuple(int(size) for size in shape.split("x")) for shape in args.shapes]
    linears = {name: [make(cpu, kind, *shape) for shape in sizes * args.copies] for name, kind in KINDS.items()}
    products = args.copies * sum(outs * inner for outs, inner in sizes)
    for rows in args.rows:
        inputs = {inner: torch.randn(rows, inner).bfloat16() for _, inner in sizes}
        taken = measure(linears, inputs, max(10, min(200, int(1e11 / products / rows))))
        for kind, seconds in taken.items():
            speed, ratio = products * rows / seconds * 1e-9, taken["bfloat16"] / seconds
            print(f"{rows:4} rows  {kind:22} {speed:6.0f} GMAC/s  {ratio:.2f} x bfloat16", flush=True)


if __name__ == "__main__":
    main()
