"""torch._grouped_mm for experts with many rows. Not for --deterministic, because tiles depend on the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.gpu.experts import triton_experts as kernels
from quire.kernels.gpu.triton_launch_sizes import cdiv

_COMPUTE_MAJORS = (9, 10)
"""PyTorch 2.13 has a kernel for these. Elsewhere it reads the offsets on the host and multiplies expert by expert."""
_MAX_EXPERTS = 1023
_ALIGNMENT = 16
"""Bytes, of every row of inputs, weights and outputs."""
_GATHER_BLOCK = 1024

grouped_mm = torch._grouped_mm
"""Older PyTorch lacks the public function."""


@dataclass(frozen=True, slots=True)
class GroupedMatmul:
    gate_up: Tensor
    """[experts, hidden, outs], a view of all experts' weights, whose inner dimension is contiguous."""
    down: Tensor
    """[experts, inner, hidden], likewise."""

    def gather_rows(self, x: Tensor, order: Tensor, starts: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
        """Return x [tokens, hidden] as sorted rows, and the place of each row among them. Other ranks' rows are left
        uninitialized.
        """
        rows, size = len(order), x.shape[1]
        gathered, places = x.new_empty((rows, size)), torch.empty_like(order)
        kernels.gather_rows[rows, cdiv(size, _GATHER_BLOCK)](
            x, gathered, order, places, starts, size, per_token, len(self.down), _GATHER_BLOCK
        )
        return gathered, places

    def compute_expert_outputs(
        self, x: Tensor, order: Tensor, starts: Tensor, per_token: int, activate: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return sorted outputs [rows, hidden], and the place of each row. The host never waits: `starts` stay on the
        device.
        """
        gathered, places = self.gather_rows(x, order, starts, per_token)
        gate_up = multiply_groups(gathered, self.gate_up, starts)
        return multiply_groups(activate(gate_up).contiguous(), self.down, starts), places


def multiply_groups(rows: Tensor, weights: Tensor, starts: Tensor) -> Tensor:
    """Return [rows, outs] for sorted rows [rows, inner] and weights [experts, inner, outs]. Rows after the last start
    are left uninitialized.
    """
    return grouped_mm(rows, weights, starts[1:])


def is_supported(device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] in _COMPUTE_MAJORS
    )


def make_grouped_matmul(gate_up: Sequence[Tensor], down: Sequence[Tensor]) -> GroupedMatmul | None:
    """For weights [outs, inner]. None if they are not stacked (see `Backend.stacks_experts`), because a stack made here
    would be a second copy.
    """
    stacks = [stack for weights in (gate_up, down) if (stack := _view_as_stack(weights)) is not None]
    if len(stacks) < 2 or not is_supported(stacks[0].device, stacks[0].dtype) or not 1 < len(down) <= _MAX_EXPERTS:
        return None
    sizes = {size for stack in stacks for size in stack.shape[1:]}
    return None if any(size * stacks[0].itemsize % _ALIGNMENT for size in sizes) else GroupedMatmul(*stacks)


def _view_as_stack(weights: Sequence[Tensor]) -> Tensor | None:
    """[experts, inner, outs]; None if the weights do not follow one another in one storage."""
    first = weights[0]
    outs, inner = first.shape
    size, begin = first.numel(), first.storage_offset()
    storage = first.untyped_storage()._cdata
    for number, each in enumerate(weights):
        if (
            each.untyped_storage()._cdata != storage
            or each.storage_offset() != begin + number * size
            or each.shape != first.shape
            or not each.is_contiguous()
        ):
            return None
    return first.as_strided((len(weights), outs, inner), (size, inner, 1), begin).transpose(1, 2)
