from __future__ import annotations

import statistics
from functools import partial

import torch

from benchmarks.flight.finding import Finding, Say, tried
from benchmarks.gpu import times
from quire.kernels.backend import Backend, MoEComponents
from quire.kernels.parameters.routing import Routing
from quire.kernels.reference import ReferenceBackend
from quire.kernels.routing import MoE

_SHAPES = {"Qwen3-30B-A3B": (2048, 768, 128, 8), "Mixtral": (4096, 14336, 8, 2)}
"""Hidden size, expert width, experts, experts per token."""
_ROWS = (1, 16, 256, 4096)


def experts(device: torch.device, say: Say, backend: Backend, timed: bool) -> None:
    """`timed`: speed instead of correctness."""
    small = device.type == "cpu"
    for name, shape in {"a small one": (64, 96, 8, 2)}.items() if small else _SHAPES.items():
        weights = [_weights(shape, device), _weights(shape, device, down=True)]
        router = torch.randn((shape[2], shape[0]), device=device).bfloat16() * shape[0] ** -0.5
        routing = Routing(shape[3])
        if not timed:
            tried(say, f"experts of {name}", partial(_right, backend, weights, router, routing))
            continue
        mixture = _mixture(backend, weights, router, routing)
        for rows in _ROWS[: 2 if small else None]:
            x = torch.randn((rows, shape[0]), device=device).bfloat16()
            seconds = statistics.median(times(lambda: mixture(x, x), device, 10))  # noqa: B023
            work = 6 * shape[0] * shape[1] * shape[3] * rows
            read = min(shape[2], rows * shape[3]) * 6 * shape[0] * shape[1]
            rates = f"at most {read / seconds / 1e9:.0f} GB/s, {work / seconds / 1e12:.1f} TFLOP/s"
            say(Finding(f"experts of {name}, {rows} rows", f"{seconds * 1e6:.0f} us, {rates}"))


def _weights(shape: tuple[int, int, int, int], device: torch.device, *, down: bool = False) -> torch.Tensor:
    hidden, inner, count, _ = shape
    outs, ins = (hidden, inner) if down else (2 * inner, hidden)
    return torch.randn((count, outs, ins), device=device, dtype=torch.bfloat16) * ins**-0.5


def _mixture(backend: Backend, weights: list[torch.Tensor], router: torch.Tensor, routing: Routing) -> MoE:
    gate_up, down = ([backend.pack_linear(each, None) for each in stacked] for stacked in weights)
    return backend.make_moe(MoEComponents(backend.pack_linear(router, None, wide=True), gate_up, down, routing))


def _right(backend: Backend, weights: list[torch.Tensor], router: torch.Tensor, routing: Routing) -> str:
    """Compares with PyTorch, expert by expert."""
    x = torch.randn((400, router.shape[1]), device=router.device).bfloat16()
    chosen = (x.float() @ router.float().T).topk(routing.top_k + 1).values
    x = x[chosen[:, -2] - chosen[:, -1] > 0.05][:40]  # rounding may change close choices
    ours = _mixture(backend, weights, router, routing)(x, x).float()
    theirs = _mixture(ReferenceBackend(), weights, router, routing)(x, x).float()
    error = ((ours - theirs).norm() / theirs.norm()).item()
    if not error < 0.02:
        raise ValueError(f"relative error {error:.3g}, at most 0.02")
    return f"relative error {error:.2g}"
