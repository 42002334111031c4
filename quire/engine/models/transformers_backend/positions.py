from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class ModuleProxy(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)


class CachedRotary(ModuleProxy):
    """Computes the rotations of all positions once. A token's rotation must not depend on its neighbors, and scaling
    must assume one context length.
    """

    def __init__(self, module: nn.Module, num_positions: int, context: int) -> None:
        super().__init__(module)
        self._positions, self._context = num_positions, context
        self._tables: dict[str, tuple[Tensor, ...] | None] = {}

    def forward(self, x: Tensor, position_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if position_ids is None or position_ids.ndim != 2 or any(isinstance(each, Tensor) for each in kwargs.values()):
            return self._module(x, position_ids, *args, **kwargs)
        key = f"{x.dtype} {args} {kwargs}"
        if key not in self._tables:
            self._tables[key] = self._compute_table(x, args, kwargs)
        if (table := self._tables[key]) is None:
            return self._module(x, position_ids, *args, **kwargs)
        rotations = tuple(each[:, position_ids[0]] for each in table)
        return rotations if len(rotations) > 1 else rotations[0]

    def _compute_table(self, x: Tensor, args: Any, kwargs: Any) -> tuple[Tensor, ...] | None:
        position_ids = torch.arange(self._positions, device=x.device)[None]
        if self._context > self._positions:  # the class derives the context length from the last position
            position_ids = torch.cat((position_ids, position_ids.new_tensor([[self._context - 1]])), dim=1)
        output = self._module(x, position_ids, *args, **kwargs)
        parts = output if isinstance(output, tuple) else (output,)
        by_position = all(isinstance(each, Tensor) and each.shape[:2] == position_ids.shape for each in parts)
        return tuple(each[:, : self._positions] for each in parts) if by_position else None


def is_rotary(module: nn.Module) -> bool:
    names = list(inspect.signature(module.forward).parameters)
    return "Rotary" in type(module).__name__ and names[:2] == ["x", "position_ids"]


class StepPositionInjector(nn.Module):
    """Passes the step's positions to an embedding that would count from the cache length."""

    def __init__(self, module: nn.Module, positions: Callable[[], Tensor]) -> None:
        super().__init__()
        self._module, self._get_step_positions = module, positions

    def forward(self, *args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        return self._module(*args, position_ids=self._get_step_positions().view(position_ids.shape), **kwargs)


def has_positions_from_cache_length(module: nn.Module) -> bool:
    names = inspect.signature(module.forward).parameters
    lengths = {"cache_length", "past_key_values_length"}  # the latter up to transformers 5.23
    return "Positional" in type(module).__name__ and "position_ids" in names and not lengths.isdisjoint(names)
