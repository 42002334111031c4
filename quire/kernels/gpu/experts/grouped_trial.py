"""Puts PyTorch's grouped product before Triton's for the numbers of rows at which it is right and faster on this GPU.

Both multiply a layer's own weights, because other weights would need memory. Never ran on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.device.error_messages import describe_kernel_error
from quire.kernels.gpu.experts.grouped_matmul import GroupedMatmul, multiply_groups

log = logging.getLogger("quire.kernels")

TRIAL_TOKENS = (256, 1024, 4096)
"""Tokens per step, ascending. Below the first, the time is that of reading weights."""
MAX_ERROR = 0.01
"""Of any row, relative to float64. The result's dtype has 8 bits."""
_MAX_TIME_SHARE = 0.97
"""Of Triton's time. Less is noise."""
_RUNS, _CALLS_PER_RUN = 5, 3


class TrialRows(NamedTuple):
    """The first expert has no rows, and some rows are another rank's."""

    x: Tensor
    """[tokens, hidden]."""
    hidden: Tensor
    """[rows, inner], sorted."""
    order: Tensor
    starts: Tensor


TritonProducts = Callable[[TrialRows], object]
"""Launches both products by Triton's kernel."""

VERDICTS: dict[tuple[object, ...], int | None] = {}
"""By device and shapes, so that one layer is tried. A cached function would keep the layer's weights."""


def find_min_rows(matmul: GroupedMatmul, run_triton: TritonProducts, per_token: int) -> int | None:
    """Return the least number of rows, counted once per chosen expert, from which on PyTorch's product serves. None:
    Triton's kernel multiplies any number.
    """
    key = (matmul.down.device, matmul.gate_up.shape, matmul.down.shape, per_token)
    if key not in VERDICTS:
        VERDICTS[key] = _try_sizes(matmul, run_triton, per_token)
    return VERDICTS[key]


def _try_sizes(matmul: GroupedMatmul, run_triton: TritonProducts, per_token: int) -> int | None:
    least = None
    try:
        for tokens in reversed(TRIAL_TOKENS):
            rows = _draw_rows(matmul, tokens, per_token)
            if not (error := _largest_row_error(matmul, rows, per_token)) <= MAX_ERROR:
                log.warning(
                    "Triton's kernel multiplies all experts, because torch._grouped_mm is wrong for %d tokens "
                    "(relative error %.2g)",
                    tokens,
                    error,
                )
                return None
            grouped, triton = (
                measure_seconds(call, rows.x.device)
                for call in (lambda: _run_grouped(matmul, rows, per_token), lambda: run_triton(rows))  # noqa: B023
            )
            log.debug("experts of %d tokens: torch._grouped_mm %.3g s, Triton %.3g s", tokens, grouped, triton)
            if grouped > _MAX_TIME_SHARE * triton:
                break
            least = tokens * per_token
    except Exception as error:  # falls back to Triton's kernel
        log.warning(
            "Triton's kernel multiplies all experts, because torch._grouped_mm failed: %s", describe_kernel_error(error)
        )
        return None
    if least is None:
        log.info("Triton's kernel multiplies all experts, because torch._grouped_mm is not faster")
    else:
        log.info("torch._grouped_mm multiplies experts from %d rows on", least)
    return least


def _draw_rows(matmul: GroupedMatmul, tokens: int, per_token: int) -> TrialRows:
    experts, hidden_size, _ = matmul.gate_up.shape
    device, dtype = matmul.down.device, matmul.down.dtype
    generator = torch.Generator(device).manual_seed(0)
    chosen = torch.randint(1, experts + 1, (tokens * per_token,), generator=generator, device=device)
    bounds = torch.arange(experts + 1, device=device)
    starts = (chosen < bounds[:, None]).sum(1).int()
    x, hidden = (
        torch.randn((count, size), generator=generator, dtype=dtype, device=device)
        for count, size in ((tokens, hidden_size), (len(chosen), matmul.down.shape[1]))
    )
    return TrialRows(x, hidden, chosen.argsort(stable=True).int(), starts)


def _run_grouped(matmul: GroupedMatmul, rows: TrialRows, per_token: int) -> tuple[Tensor, Tensor]:
    """There is no activation between the products."""
    gathered, _ = matmul.gather_rows(rows.x, rows.order, rows.starts, per_token)
    gate_up = multiply_groups(gathered, matmul.gate_up, rows.starts)
    return gate_up, multiply_groups(rows.hidden, matmul.down, rows.starts)


def _largest_row_error(matmul: GroupedMatmul, rows: TrialRows, per_token: int) -> float:
    """NaN if a result is."""
    with refuse_waits(rows.x.device):
        gate_up, down = _run_grouped(matmul, rows, per_token)
    starts = rows.starts.tolist()
    tokens = (rows.order[: starts[-1]] // per_token).long()
    errors = (
        row_errors(gate_up, rows.x[tokens], matmul.gate_up, starts),
        row_errors(down, rows.hidden, matmul.down, starts),
    )
    return torch.cat(errors).max().item()


def row_errors(product: Tensor, x: Tensor, weights: Tensor, starts: Sequence[int]) -> Tensor:
    errors = []
    for weight, begin, end in zip(weights, starts, starts[1:], strict=False):
        wanted = x[begin:end].double() @ weight.double()
        errors.append((product[begin:end].double() - wanted).norm(dim=1) / wanted.norm(dim=1))
    return torch.cat(errors)


@contextmanager
def refuse_waits(device: torch.device) -> Iterator[None]:
    """A product that waits for the device raises: it would stall every step, and no CUDA graph could hold it."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def measure_seconds(call: Callable[[], object], device: torch.device) -> float:
    call()  # may compile
    best = float("inf")
    for _ in range(_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        begin.record(stream)
        for _ in range(_CALLS_PER_RUN):
            call()
        end.record(stream)
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000 / _CALLS_PER_RUN)
    return best
