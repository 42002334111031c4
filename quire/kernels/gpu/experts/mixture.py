"""A mixture of experts by the kernels of triton_experts.py: routed, sorted, multiplied and weighed on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS, Linear
from quire.kernels.experts import between, choose
from quire.kernels.gpu import triton_sizes
from quire.kernels.gpu.experts import triton_experts as kernels
from quire.kernels.gpu.quantization import triton_quantized
from quire.kernels.gpu.quantization.packing import Packed
from quire.kernels.gpu.quantization.quantized import QuantizedLinear, Tiles, choose_tiles
from quire.kernels.gpu.triton_linear import DenseLinear
from quire.kernels.gpu.triton_sizes import cdiv, power_of_2
from quire.kernels.routing import Experts

if TYPE_CHECKING:
    from quire.kernels.backend import Backend

_SORTED_AT_ONCE = 4096
_BLOCK = 1024
"""Numbers of a token that one program weighs."""
_ALIGNED = 16
"""Bytes: kernels read so many at once."""
_NUMBERS = (triton_quantized.NUMBERS, 0, 0, False, False)
_DENSE_STEP = 64
_FEW, _MANY = 16, 64
"""Rows of an expert, on average, up to which tiles are small, and from which on they are large,"""
_LARGE, _LARGE_BYTES = Tiles(128, 256, 8, 4), 192 * 1024
"""so large for 16 bits, where there is that much shared memory;"""
_WIDE, _WIDE_BYTES = 128, 120 * 1024
"""of codes of so many inputs a step."""


@dataclass(frozen=True, slots=True)
class Stack:
    """One linear of every expert. The weights stay where they are; the kernel finds them by their addresses."""

    parts: list[Packed]
    """One of each expert, all alike; of 16 bits too."""
    biases: list[Tensor] | None
    table: Tensor
    """[5, experts] int64."""
    fixed: bool

    @classmethod
    def of(cls, linears: Sequence[Linear], *, fixed: bool) -> Stack | None:
        """None where they are of no kind that the kernel knows, or differ."""
        found = [_packed(each) for each in linears]
        known = [each for each in found if each is not None]
        if len(known) < len(found) or len({(part.kind, part.lines) for part, _ in known}) > 1:
            return None
        parts = [part for part, _ in known]
        biases = [bias.contiguous() for _, bias in known if bias is not None]
        if len(biases) not in (0, len(parts)):
            return None
        tensors = [
            [each.codes for each in parts],
            [each.kernel_scales[0] for each in parts],
            [each.kernel_scales[1] for each in parts],
            [each.factors for each in parts],
            biases or [each.factors for each in parts],
        ]
        found_at = addresses(tensors)
        if any(address % _ALIGNED for row in found_at for address in row):
            return None
        table = torch.tensor(found_at, dtype=torch.int64, device=parts[0].codes.device)
        return cls(parts, biases or None, table, fixed)

    def multiply(
        self, x: Tensor, order: Tensor, starts: Tensor, per_token: int, count: int, *, of_tokens: bool
    ) -> Tensor:
        """[rows, outs], as `multiply_experts` says it. count: of all experts, those of other ranks too."""
        part, rows, experts = self.parts[0], len(order), len(self.parts)
        outs, numbers = part.outs, part.form[0] == triton_quantized.NUMBERS
        tiles = _tiles(cdiv(rows, count), x.dtype, part, fixed=self.fixed)
        out = x.new_empty((rows, outs))
        most = min(rows, rows // tiles.block_m + experts)
        bias = part.factors if self.biases is None else self.biases[0]
        kernels.multiply_experts[most * cdiv(outs, tiles.block_n),](
            x, out, order, starts, self.table, part.codes, part.kernel_scales[0], part.factors, bias, rows, most, outs,
            part.inner, part.stride, part.group, per_token, of_tokens, experts, power_of_2(experts),
            *part.form, not numbers, self.biases is not None, tiles.block_m, tiles.block_n, part.step,
            part.lines, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
        return out


class GroupedMixture:
    """Linears that `Stack` knows. A row's sums follow from the row alone, in one order; where tiles are fixed, its bits
    too."""

    def __init__(self, backend: Backend, experts: Experts, gate_up: Stack, down: Stack) -> None:
        self._backend, self._experts, self._gate_up, self._down = backend, experts, gate_up, down

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """routed: what the router reads; None: x."""
        experts, routed, x = self._experts, x if routed is None else routed, x.contiguous()
        out = torch.empty_like(x)
        if not len(x):
            return out
        chosen, shares, count = choose_at_once(experts, routed)
        here = len(self._gate_up.parts)
        order, starts = sort_rows(chosen, here, experts.first)
        each, read = experts.routing.per_token, x
        if experts.routing.inputs:  # as many rows of each token as it has experts
            read, shares = (x[:, None] * shares[:, :, None]).to(x.dtype).flatten(0, 1), torch.ones_like(shares)
        rows_of_token = 1 if experts.routing.inputs else each
        gate_up = self._gate_up.multiply(read, order, starts, rows_of_token, count, of_tokens=True)
        given = self._down.multiply(
            between(self._backend, experts, gate_up).contiguous(), order, starts, each, count, of_tokens=False
        )
        size = out.shape[1]
        kernels.weigh[len(x), cdiv(size, _BLOCK)](out, given, shares, chosen, size, experts.first, here, each, _BLOCK)
        return out


def grouped_mixture(backend: Backend, experts: Experts, *, fixed: bool) -> GroupedMixture | None:
    """None where a linear is of a kind that the kernels do not know."""
    gate_up, down = (Stack.of(each, fixed=fixed) for each in (experts.gate_up, experts.down))
    return None if gate_up is None or down is None else GroupedMixture(backend, experts, gate_up, down)


def choose_at_once(experts: Experts, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """As `choose`, contiguous, and weights in float32: by one kernel where the routing is of a usual kind."""
    routing = experts.routing
    if routing.weights == "mixer" or routing.groups > 1 or routing.softcap is not None:
        chosen, shares, count = choose(experts, x)
        return chosen.contiguous(), shares.float().contiguous(), count
    scores = experts.router(x.float() if experts.float_router else x, NO_ADAPTERS).contiguous()
    (rows, count), each = scores.shape, routing.per_token
    chosen = torch.empty((rows, each), dtype=torch.int64, device=x.device)
    shares = torch.empty((rows, each), dtype=torch.float32, device=x.device)
    correction = experts.correction
    kernels.choose[rows,](
        scores, scores if correction is None else correction, chosen, shares, routing.added, routing.scale,
        count, power_of_2(count), each, power_of_2(each), routing.weights == "sigmoid", routing.normalized,
        correction is not None, num_warps=1,
    )  # fmt: skip
    return chosen, shares if experts.factors is None else shares * experts.factors[chosen], count


def sort_rows(chosen: Tensor, experts: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Order and starts of the rows of chosen [tokens, per_token] int64, by so many experts from `first` on; the order
    of what other ranks multiply is not written."""
    order = torch.empty(chosen.numel(), dtype=torch.int32, device=chosen.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=chosen.device)
    kernels.sort_rows[experts,](chosen, order, starts, chosen.numel(), first, experts, _SORTED_AT_ONCE, num_warps=8)
    return order, starts


def addresses(tensors: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Where they lie, as long as they live."""
    return [[each.data_ptr() for each in row] for row in tensors]


def _packed(linear: Linear) -> tuple[Packed, Tensor | None] | None:
    """A linear of one part, and its bias."""
    if isinstance(linear, DenseLinear):
        weight, inner = linear.weight, linear.weight.shape[1]
        part = Packed(weight, weight, None, None, inner, _NUMBERS, inner, _DENSE_STEP, len(weight))
        return None if linear.wide else (part, linear.bias)
    if not isinstance(linear, QuantizedLinear) or linear.wide or len(linear.parts) > 1:
        return None
    (part,) = linear.parts
    return None if part.order is not None else (part, linear.bias)


def _tiles(rows: int, dtype: torch.dtype, part: Packed, *, fixed: bool) -> Tiles:
    """For so many rows of each expert; the figures of an H100 chose them."""
    tiles = choose_tiles(rows, dtype, fixed=fixed, part=part)
    if fixed or rows <= _FEW or dtype == torch.float32:
        return tiles
    numbers = part.form[0] == triton_quantized.NUMBERS
    if rows <= _MANY:
        return Tiles(64 if numbers else 32, 64, 4, 3)
    room = triton_sizes.shared_bytes(part.codes.device.index)
    if numbers and room >= _LARGE_BYTES:
        return _LARGE
    if numbers or (part.in_word * part.step <= _WIDE and room >= _WIDE_BYTES):
        return Tiles(128, 128, 8, 3)
    return tiles
