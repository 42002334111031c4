"""Modules of ours in the place of a class's, where they are the same function: linears, norms and tables of rotations.

That a norm is the same is tried, not believed: families have norms of one name and other arithmetic.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from quire.engine.layers.linear import JoinedLinear
from quire.engine.layers.parameters import Parameter, ParameterTable
from quire.kernels.backend import NO_ADAPTERS, Backend

_ROWS, _CLOSE = 3, 1e-5


class OurLinear(nn.Module):
    """An nn.Linear whose weights a scheme packs."""

    def __init__(self, linear: JoinedLinear, like: nn.Linear, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._packed = linear
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight = torch.empty(0, dtype=dtype, device=device)
        """None of it: classes ask a weight for its type and its device."""
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._packed.packed(rows.contiguous(), NO_ADAPTERS).view(*x.shape[:-1], self.out_features)


class OurNorm(nn.Module):
    """A norm over the last axis; `offset` is added to each weight."""

    def __init__(self, backend: Backend, size: int, eps: float, offset: float, *, centred: bool) -> None:
        super().__init__()
        self._backend, self._size, self._eps, self._offset, self._centred = backend, size, eps, offset, centred
        self.scales: Tensor | None = None
        self.shifts: Tensor | None = None
        self.weight = torch.empty(0)
        self.variance_epsilon = self.eps = eps

    def parameters_of(self, name: str, dtype: torch.dtype, *, biased: bool) -> ParameterTable:
        """Its tensors, where a checkpoint calls it `name`."""
        puts = {"weight": self.put_weight} | ({"bias": self.put_bias} if biased else {})
        return {f"{name}.{own}": Parameter((self._size,), dtype, put) for own, put in puts.items()}

    def put_weight(self, weight: Tensor) -> None:
        self.scales = weight.float() + self._offset
        self.weight = torch.empty(0, dtype=weight.dtype, device=weight.device)
        if self._centred and self.shifts is None:
            self.shifts = torch.zeros_like(self.scales)

    def put_bias(self, bias: Tensor) -> None:
        self.shifts = bias.float()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self._size).contiguous()
        assert self.scales is not None, "weights are not loaded"
        if self._centred:
            assert self.shifts is not None
            return self._backend.layer_norm(rows, self.scales, self.shifts, self._eps).view(x.shape)
        return self._backend.rms_norm(rows, self.scales, self._eps).view(x.shape)


def our_norm(module: nn.Module, backend: Backend) -> OurNorm | None:
    """Ours in the place of a norm on the meta device; None where it is not the same function."""
    if type(module) is nn.LayerNorm:
        if not module.elementwise_affine or len(module.normalized_shape) != 1:
            return None
        return OurNorm(backend, module.normalized_shape[0], module.eps, 0.0, centred=True)
    if not type(module).__name__.endswith("RMSNorm") or {name for name, _ in module.named_parameters()} != {"weight"}:
        return None
    weight = module.weight
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float) or list(module.buffers()):
        return None
    for offset in (0.0, 1.0):
        if _is_rms_norm(module, len(weight), eps, offset):
            return OurNorm(backend, len(weight), eps, offset, centred=False)
    return None


def _is_rms_norm(module: nn.Module, size: int, eps: float, offset: float) -> bool:
    """Whether a norm computes x / sqrt(mean(x^2) + eps) * (weight + offset), by numbers."""
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(size, generator=generator), torch.randn((_ROWS, size), generator=generator) * eps**0.5
    tried = copy.copy(module)
    tried._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    try:
        found = tried(x)
    except Exception:  # it takes more than x
        return False
    wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)
    return isinstance(found, Tensor) and found.shape == x.shape and bool(((found - wanted).abs() < _CLOSE).all())


class RotationTable(nn.Module):
    """What a class computes of positions for rotations, once for all of them: so a token's numbers do not depend on
    the tokens beside it, and scalings that a context's length chooses are those of the longest context."""

    def __init__(self, module: nn.Module, positions: int) -> None:
        super().__init__()
        self._module, self._positions = module, positions
        self._tables: dict[str, tuple[Tensor, ...] | None] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)

    def forward(self, x: Tensor, position_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if position_ids is None or position_ids.ndim != 2 or any(isinstance(each, Tensor) for each in kwargs.values()):
            return self._module(x, position_ids, *args, **kwargs)
        key = f"{x.dtype} {args} {kwargs}"
        if key not in self._tables:
            self._tables[key] = self._table(x, args, kwargs)
        if (table := self._tables[key]) is None:
            return self._module(x, position_ids, *args, **kwargs)
        found = tuple(each[:, position_ids[0]] for each in table)
        return found if len(found) > 1 else found[0]

    def _table(self, x: Tensor, args: Any, kwargs: Any) -> tuple[Tensor, ...] | None:
        """For all positions; None where what it gives is not by position."""
        every = torch.arange(self._positions, device=x.device)[None]
        found = self._module(x, every, *args, **kwargs)
        parts = found if isinstance(found, tuple) else (found,)
        by_position = all(isinstance(each, Tensor) and each.shape[:2] == every.shape for each in parts)
        return parts if by_position else None


def is_rotation(module: nn.Module) -> bool:
    """Whether it gives rotations for (x, position_ids)."""
    names = list(inspect.signature(module.forward).parameters)
    return "Rotary" in type(module).__name__ and names[:2] == ["x", "position_ids"]
