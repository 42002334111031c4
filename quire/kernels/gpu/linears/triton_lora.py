"""LoRA (Hu et al., 2021) for many adapters in a batch, as in Punica (Chen et al., 2023) and S-LoRA (Sheng et al.,
2023): one kernel shrinks inputs to the rank, another expands them. Rows are sorted by adapter. A tile of rows has one
program per adapter, which masks the rows of other adapters. Tiles and splits are fixed, so a row's bits depend only on
the row and its adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.backend import AdapterSlotSpec, Linear, LinearContext, LinearWithLora, LoraDelta
from quire.kernels.gpu.triton_launch_sizes import cdiv, next_power_of_2
from quire.kernels.quantized_tensors import (
    ActivationRounding,
    Activations,
    RoundedActivations,
    RoundedInputLinear,
    select_linear_input,
)

_ROWS_PER_TILE = 16
"""The tensor cores' minimum, because most adapters have few rows."""
_OUTPUTS_PER_TILE = 64
_INNER_STEP = 64
_SPLIT_INPUTS = 1024
"""Inputs per split. Without splits a decode has too few tiles to fill a GPU."""
_MAX_SHRINK_RANKS, _MAX_EXPAND_RANKS = 64, 32
"""Maximum ranks per tile. With 64 float32 ranks the expand kernel would spill registers."""


@triton.jit
def _tile_rows_of_adapter(adapters, order, rows, tile, nth, BLOCK_M: tl.constexpr):
    """Return (rows of the tile, mask of the rows with the tile's nth adapter, that adapter's slot). Slot 0 means no
    adapter.
    """
    i = tl.arange(0, BLOCK_M)
    at = tile * BLOCK_M + i
    inside = at < rows
    row = tl.load(order + at, mask=inside, other=0)
    slot = tl.load(adapters + row, mask=inside, other=0)
    later = inside & (i > 0)
    before = tl.load(adapters + tl.load(order + at - 1, mask=later, other=0), mask=later, other=-1)
    mine = inside & (tl.cumsum((slot != before).to(tl.int32), 0) - 1 == nth)
    return row, mine, tl.max(tl.where(mine, slot, 0), 0)


@triton.jit(do_not_specialize=["rows", "most"], do_not_specialize_on_alignment=["adapters", "order"])
def _shrink_kernel(
    middle, x, down, ranks, adapters, order, rows, most, inner,
    PARTS: tl.constexpr, RANKS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute middle [splits, rows, PARTS * RANKS] = x [rows, inner] @ down [slots, PARTS * RANKS, inner].T, only for
    ranks of the row's adapter. `most` is the maximum of adapters per tile.
    """
    row, mine, slot = _tile_rows_of_adapter(
        adapters, order, rows, tl.program_id(0) // most, tl.program_id(0) % most, BLOCK_M
    )
    if slot == 0:
        return
    blocks: tl.constexpr = (RANKS + BLOCK_R - 1) // BLOCK_R
    part = tl.program_id(1) // blocks
    r = tl.program_id(1) % blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    rank = tl.load(ranks + (slot - 1) * PARTS + part)
    if tl.program_id(1) % blocks * BLOCK_R >= rank:
        return
    k, row = tl.arange(0, BLOCK_K), row.to(tl.int64)
    first, has = tl.program_id(2) * SPLIT, r < rank
    weights = down + ((slot - 1) * (PARTS * RANKS) + part * RANKS + r).to(tl.int64)[None, :] * inner
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for begin in range(first, tl.minimum(first + SPLIT, inner), BLOCK_K):
        at = begin + k
        left = tl.load(x + row[:, None] * inner + at[None, :], mask=mine[:, None] & (at < inner)[None, :], other=0.0)
        right = tl.load(weights + at[:, None], mask=has[None, :] & (at < inner)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    to = middle + (tl.program_id(2) * rows.to(tl.int64) + row)[:, None] * (PARTS * RANKS) + (part * RANKS + r)[None, :]
    tl.store(to, total, mask=mine[:, None] & has[None, :])


@triton.jit(do_not_specialize=["rows", "most"], do_not_specialize_on_alignment=["adapters", "order"])
def _expand_kernel(
    out, middle, up, ranks, places, adapters, order, rows, most, outs,
    PARTS: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add middle, summed over splits, times `up` to `out`. In a slot of up [slots, RANKS * outs], each part has a
    matrix [RANKS, outputs of the part]. places [blocks, 4] has for each block of outputs: its part, the part's first
    output, the end of the part, and the block's first output.
    """
    row, mine, slot = _tile_rows_of_adapter(
        adapters, order, rows, tl.program_id(0) // most, tl.program_id(0) % most, BLOCK_M
    )
    if slot == 0:
        return
    place = places + tl.program_id(1) * 4
    part = tl.load(place)
    rank = tl.load(ranks + (slot - 1) * PARTS + part)
    if rank == 0:
        return
    first, end = tl.load(place + 1), tl.load(place + 2)
    n, row = tl.load(place + 3) + tl.arange(0, BLOCK_N), row.to(tl.int64)
    weights = up + (slot - 1).to(tl.int64) * RANKS * outs + first.to(tl.int64) * RANKS + (n - first)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, rank, BLOCK_R):
        r = begin + tl.arange(0, BLOCK_R)
        has = r < rank
        left = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for split in range(SPLITS):
            at = middle + (split * rows.to(tl.int64) + row)[:, None] * (PARTS * RANKS) + (part * RANKS + r)[None, :]
            left += tl.load(at, mask=mine[:, None] & has[None, :], other=0.0)
        right = tl.load(
            weights + r.to(tl.int64)[:, None] * (end - first), mask=has[:, None] & (n < end)[None, :], other=0.0
        )
        total = tl.dot(left.to(right.dtype), right, total, input_precision="ieee")
    to, inside = out + row[:, None] * outs + n[None, :], mine[:, None] & (n < end)[None, :]
    total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class PinnedLoraDeltas:
    parts: tuple[tuple[int, Tensor, Tensor], ...]
    """(part index, down [rank, in], transposed up [rank, outs])."""
    ranks: Tensor
    """[parts] int32."""


class TritonLinearWithLora(LinearWithLora, RoundedInputLinear):
    def __init__(self, linear: Linear, slots: AdapterSlotSpec, split: int = _SPLIT_INPUTS) -> None:
        count = slots.num_slots
        parts = slots.output_sizes
        ranks = slots.max_rank
        outs = sum(parts)
        inner = slots.in_features
        device = slots.device
        self._linear = linear
        self._num_slots = count
        self._split = split
        self._first_outputs = [sum(parts[:index]) for index in range(len(parts))]
        self._max_rank = ranks
        self._block_r = min(_MAX_SHRINK_RANKS, max(16, next_power_of_2(ranks)))
        self._down = torch.empty((count, len(parts) * ranks, inner), dtype=slots.dtype, device=device)
        self._up = torch.empty((count, ranks * outs), dtype=slots.dtype, device=device)
        self._ranks = torch.zeros((count, len(parts)), dtype=torch.int32, device=device)
        places = [
            (part, first, first + size, begin)
            for part, (first, size) in enumerate(zip(self._first_outputs, parts, strict=True))
            for begin in range(first, first + size, _OUTPUTS_PER_TILE)
        ]
        self._output_blocks = torch.tensor(places, dtype=torch.int32).to(device)

    def input_roundings(self, rows: int) -> tuple[ActivationRounding | None, ...]:
        """None is added, because adapters need unrounded x."""
        linear = self._linear
        return (*linear.input_roundings(rows), None) if isinstance(linear, RoundedInputLinear) else (None,)

    def __call__(self, x: Activations, context: LinearContext) -> Tensor:
        out, adapters = self._linear(select_linear_input(self._linear, x), context), context.adapter_slots
        if adapters is None or not len(x):
            return out
        assert out.is_contiguous()
        whole = x.unrounded if isinstance(x, RoundedActivations) else x
        assert whole is not None
        (rows, inner) = whole.shape
        x = whole.contiguous()
        order = context.row_order
        assert order is not None
        parts = len(self._first_outputs)
        ranks = self._max_rank
        splits = cdiv(inner, self._split)
        most = min(_ROWS_PER_TILE, self._num_slots + 1)
        programs, blocks = cdiv(rows, _ROWS_PER_TILE) * most, parts * cdiv(ranks, self._block_r)
        middle = torch.empty((splits, rows, parts * ranks), dtype=torch.float32, device=x.device)
        _shrink_kernel[programs, blocks, splits](
            middle, x, self._down, self._ranks, adapters, order, rows, most, inner, parts, ranks, self._split,
            _ROWS_PER_TILE, self._block_r, _INNER_STEP, num_warps=4, num_stages=3,
        )  # fmt: skip
        _expand_kernel[programs, len(self._output_blocks)](
            out, middle, self._up, self._ranks, self._output_blocks, adapters, order, rows, most, out.shape[1], parts,
            ranks, splits, _ROWS_PER_TILE, min(self._block_r, _MAX_EXPAND_RANKS), _OUTPUTS_PER_TILE, num_warps=4,
            num_stages=2,
        )  # fmt: skip
        return out

    def pack_one_adapter(self, deltas: Sequence[LoraDelta]) -> PinnedLoraDeltas:
        """Copy to pinned memory, which allows asynchronous uploads."""
        ranks = torch.zeros(len(self._first_outputs), dtype=torch.int32)
        packed_parts = []
        for delta in deltas:
            part = self._first_outputs.index(delta.first_output)
            ranks[part] = len(delta.down)
            packed_parts.append((part, self._copy_to_pinned(delta.down), self._copy_to_pinned(delta.up.t())))
        return PinnedLoraDeltas(tuple(packed_parts), self._copy_to_pinned(ranks))

    @torch.inference_mode()
    def put_adapter(self, slot: int, packed: PinnedLoraDeltas | None) -> None:
        """Queue the copies after running steps. The host does not wait."""
        at = slot - 1
        if packed is None:
            self._ranks[at].zero_()
            return
        for part, down, up in packed.parts:
            first, begin = part * self._max_rank, self._first_outputs[part] * self._max_rank
            self._down[at, first : first + len(down)].copy_(down, non_blocking=True)
            self._up[at, begin : begin + up.numel()].copy_(up.flatten(), non_blocking=True)
        self._ranks[at].copy_(packed.ranks, non_blocking=True)

    def _copy_to_pinned(self, tensor: Tensor) -> Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._down.is_cuda)
        return pinned.copy_(tensor)
