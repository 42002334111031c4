from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS, Linear
from quire.kernels.experts import apply_expert_activation, route_tokens
from quire.kernels.gpu import triton_launch_sizes
from quire.kernels.gpu.experts import grouped_trial
from quire.kernels.gpu.experts import triton_experts as kernels
from quire.kernels.gpu.experts.grouped_matmul import GroupedMatmul, make_grouped_matmul
from quire.kernels.gpu.linears.triton_linear import DenseLinear
from quire.kernels.gpu.quantization import triton_quantized
from quire.kernels.gpu.quantization.quantized_linear import MatmulTiles, TritonQuantizedLinear, choose_matmul_tiles
from quire.kernels.gpu.quantization.weight_packing import PackedWeight
from quire.kernels.gpu.triton_launch_sizes import cdiv, next_power_of_2
from quire.kernels.routing import MoEComponents

if TYPE_CHECKING:
    from quire.kernels.backend import Backend

_SORT_BLOCK = 4096
_COMBINE_BLOCK = 1024
"""Outputs per program."""
_ALIGNMENT = 16
_UNQUANTIZED_FORM = (triton_quantized.NUMBERS, 0, 0, False, False)
_DENSE_STEP = 64
_MAX_SMALL_TILE_ROWS, _MIN_LARGE_TILE_ROWS = 16, 64
"""Average rows per expert."""
_LARGE_TILES, _LARGE_TILE_BYTES = MatmulTiles(128, 256, 8, 4), 192 * 1024
"""Tiles for 16-bit weights, and the bytes of shared memory that they need."""
_MAX_WIDE_STEP, _WIDE_TILE_BYTES = 128, 120 * 1024
"""Limits for large tiles of quantized weights: maximum inputs per step, and minimum bytes of shared memory."""


@dataclass(frozen=True, slots=True)
class ExpertLinearGroup:
    """One linear of every expert, which kernels read by address, so nothing is copied."""

    parts: list[PackedWeight]
    """All parts have one format, which may be 16-bit."""
    biases: list[Tensor] | None
    address_table: Tensor
    """[5, experts] int64."""
    has_fixed_tiles: bool

    @classmethod
    def from_linears(cls, linears: Sequence[Linear], *, fixed: bool) -> ExpertLinearGroup | None:
        packed_parts = [_packed_weight_and_bias(each) for each in linears]
        known = [each for each in packed_parts if each is not None]
        if (
            len(known) < len(packed_parts)
            or len({(part.kernel_key, part.interleaved_outputs) for part, _ in known}) > 1
        ):
            return None
        parts = [part for part, _ in known]
        biases = [bias.contiguous() for _, bias in known if bias is not None]
        if len(biases) not in (0, len(parts)):
            return None
        tensors = [
            [each.codes for each in parts],
            [each.kernel_scales_and_offsets[0] for each in parts],
            [each.kernel_scales_and_offsets[1] for each in parts],
            [each.factors for each in parts],
            biases or [each.factors for each in parts],
        ]
        tensor_pointers = data_ptr_lists(tensors)
        if any(address % _ALIGNMENT for row in tensor_pointers for address in row):
            return None
        table = torch.tensor(tensor_pointers, dtype=torch.int64, device=parts[0].codes.device)
        return cls(parts, biases or None, table, fixed)

    @property
    def is_plain(self) -> bool:
        return self.biases is None and self.parts[0].kernel_form == _UNQUANTIZED_FORM

    def multiply_experts(
        self, x: Tensor, order: Tensor, starts: Tensor, per_token: int, count: int, *, of_tokens: bool
    ) -> Tensor:
        """Return [rows, outs]. count: experts on all ranks. order, starts, of_tokens: see triton_experts.py."""
        part = self.parts[0]
        rows = len(order)
        experts = len(self.parts)
        outs, numbers = part.out_features, part.kernel_form[0] == triton_quantized.NUMBERS
        tiles = _choose_expert_tiles(cdiv(rows, count), x.dtype, part, fixed=self.has_fixed_tiles)
        out = x.new_empty((rows, outs))
        most = min(rows, rows // tiles.block_m + experts)
        bias = part.factors if self.biases is None else self.biases[0]
        kernels.multiply_experts[most * cdiv(outs, tiles.block_n),](
            x, out, order, starts, self.address_table, part.codes, part.kernel_scales_and_offsets[0], part.factors,
            bias, rows, most, outs, part.in_features, part.words_per_output, part.group_size, per_token, of_tokens,
            experts, next_power_of_2(experts), *part.kernel_form, not numbers, self.biases is not None, tiles.block_m,
            tiles.block_n, part.inputs_per_step, part.interleaved_outputs, num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )  # fmt: skip
        return out


class GroupedMoE:
    """Which terms a row's sums have does not depend on other rows. With fixed tiles, neither do its bits."""

    def __init__(
        self,
        backend: Backend,
        experts: MoEComponents,
        gate_up: ExpertLinearGroup,
        down: ExpertLinearGroup,
        grouped: tuple[GroupedMatmul, int] | None = None,
    ) -> None:
        """grouped: PyTorch's product, and the least number of rows that it multiplies."""
        self._backend = backend
        self._experts = experts
        self._gate_up = gate_up
        self._down = down
        self._grouped = grouped

    def __call__(self, x: Tensor, router_input: Tensor | None = None) -> Tensor:
        experts = self._experts
        router_input = x if router_input is None else router_input
        x = x.contiguous()
        out = torch.empty_like(x)
        if not len(x):
            return out
        chosen, shares, count = route_on_device(experts, router_input)
        here = len(self._gate_up.parts)
        grouped = self._choose_grouped_matmul(chosen.numel() * here // count)
        order, starts = sort_rows_by_expert(chosen, here, experts.first_expert, zero_starts=grouped is not None)
        each, read = experts.routing.top_k, x
        if experts.routing.weights_inputs:
            read, shares = (x[:, None] * shares[:, :, None]).to(x.dtype).flatten(0, 1), torch.ones_like(shares)
        rows_of_token = 1 if experts.routing.weights_inputs else each
        activate = partial(apply_expert_activation, self._backend, experts)
        places = None
        if grouped is not None:
            outputs, places = grouped.compute_expert_outputs(read, order, starts, rows_of_token, activate)
        else:
            gate_up = self._gate_up.multiply_experts(read, order, starts, rows_of_token, count, of_tokens=True)
            activated = activate(gate_up).contiguous()
            outputs = self._down.multiply_experts(activated, order, starts, each, count, of_tokens=False)
        size = out.shape[1]
        kernels.combine_expert_outputs[len(x), cdiv(size, _COMBINE_BLOCK)](
            out, outputs, shares, chosen, order if places is None else places, size, experts.first_expert, here, each,
            places is not None, _COMBINE_BLOCK,
        )  # fmt: skip
        return out

    def _choose_grouped_matmul(self, rows: int) -> GroupedMatmul | None:
        """rows: as many as this rank's experts have on average."""
        if self._grouped is None:
            return None
        matmul, min_rows = self._grouped
        return matmul if rows >= min_rows else None


def make_grouped_moe(backend: Backend, experts: MoEComponents, *, fixed: bool) -> GroupedMoE | None:
    gate_up, down = (ExpertLinearGroup.from_linears(each, fixed=fixed) for each in (experts.gate_up, experts.down))
    if gate_up is None or down is None:
        return None
    grouped = None if fixed else _choose_grouped(gate_up, down, experts.routing.top_k)
    return GroupedMoE(backend, experts, gate_up, down, grouped)


def _choose_grouped(
    gate_up: ExpertLinearGroup, down: ExpertLinearGroup, per_token: int
) -> tuple[GroupedMatmul, int] | None:
    """PyTorch's product takes no biases."""
    if not gate_up.is_plain or not down.is_plain:
        return None
    matmul = make_grouped_matmul([each.codes for each in gate_up.parts], [each.codes for each in down.parts])
    if matmul is None:
        return None
    experts = len(down.parts)

    def run_triton(rows: grouped_trial.TrialRows) -> None:
        gate_up.multiply_experts(rows.x, rows.order, rows.starts, per_token, experts, of_tokens=True)
        down.multiply_experts(rows.hidden, rows.order, rows.starts, per_token, experts, of_tokens=False)

    min_rows = grouped_trial.find_min_rows(matmul, run_triton, per_token)
    return None if min_rows is None else (matmul, min_rows)


def route_on_device(experts: MoEComponents, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Like `route_tokens`, with contiguous results and float32 weights. One kernel computes common routings."""
    routing = experts.routing
    if routing.score_function not in ("softmax", "sigmoid") or routing.num_groups > 1 or routing.softcap is not None:
        chosen, shares, count = route_tokens(experts, x)
        return chosen.contiguous(), shares.float().contiguous(), count
    scores = experts.router(x.float() if experts.has_float32_router else x, NO_ADAPTERS).contiguous()
    (rows, count), each = scores.shape, routing.top_k
    # PyTorch reads scales by these indices even if `dry_run_for_variants` launches no kernel that writes them.
    allocate = torch.empty if experts.expert_scales is None else torch.zeros
    chosen = allocate((rows, each), dtype=torch.int64, device=x.device)
    shares = torch.empty((rows, each), dtype=torch.float32, device=x.device)
    correction = experts.score_correction_bias
    kernels.choose_experts[rows,](
        scores, scores if correction is None else correction, chosen, shares, routing.normalizer_eps, routing.scale,
        count, next_power_of_2(count), each, next_power_of_2(each), routing.score_function == "sigmoid",
        routing.is_normalized, correction is not None, num_warps=1,
    )  # fmt: skip
    return chosen, shares if experts.expert_scales is None else shares * experts.expert_scales[chosen], count


def sort_rows_by_expert(
    chosen: Tensor, experts: int, first: int = 0, *, zero_starts: bool = False
) -> tuple[Tensor, Tensor]:
    """Sort rows by expert for chosen [tokens, top_k] int64, without other ranks' rows. Returns the order, and where
    experts start. If `zero_starts`, the starts are 0 where no kernel writes them: `dry_run_for_variants` launches no
    Triton kernel but does call a library, which must then find no rows.
    """
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    starts = (torch.zeros if zero_starts else torch.empty)(experts + 1, dtype=torch.int32, device=chosen.device)
    kernels.sort_rows[experts,](chosen, order, starts, chosen.numel(), first, experts, _SORT_BLOCK, num_warps=8)
    return order, starts


def data_ptr_lists(tensors: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Addresses are valid while the tensors live."""
    return [[each.data_ptr() for each in row] for row in tensors]


def _packed_weight_and_bias(linear: Linear) -> tuple[PackedWeight, Tensor | None] | None:
    if isinstance(linear, DenseLinear):
        weight, inner = linear.weight, linear.weight.shape[1]
        part = PackedWeight(weight, weight, None, None, inner, _UNQUANTIZED_FORM, inner, _DENSE_STEP, len(weight))
        return None if linear.has_float32_output else (part, linear.bias)
    if not isinstance(linear, TritonQuantizedLinear) or linear.has_float32_output or len(linear.parts) > 1:
        return None
    (part,) = linear.parts
    return None if part.input_order is not None else (part, linear.bias)


def _choose_expert_tiles(rows: int, dtype: torch.dtype, part: PackedWeight, *, fixed: bool) -> MatmulTiles:
    """`rows` is the average number per expert. Measured on an H100."""
    tiles = choose_matmul_tiles(rows, dtype, fixed=fixed, part=part)
    if fixed or rows <= _MAX_SMALL_TILE_ROWS or dtype == torch.float32:
        return tiles
    numbers = part.kernel_form[0] == triton_quantized.NUMBERS
    if rows <= _MIN_LARGE_TILE_ROWS:
        return MatmulTiles(64 if numbers else 32, 64, 4, 3)
    room = triton_launch_sizes.shared_memory_bytes(part.codes.device.index)
    if numbers and room >= _LARGE_TILE_BYTES:
        return _LARGE_TILES
    if numbers or (part.codes_per_word * part.inputs_per_step <= _MAX_WIDE_STEP and room >= _WIDE_TILE_BYTES):
        return MatmulTiles(128, 128, 8, 3)
    return tiles
