"""Positions in transformers' classes: those of the step's tokens in the place of what a class would count, and tables
of what it computes of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class ModuleProxy(nn.Module):
    """In the place of a class's module, with whatever that has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)


class CachedRotary(ModuleProxy):
    """What a class computes of positions for rotations, once for all of them: so a token's numbers do not depend on
    the tokens beside it, and scalings that a context's length chooses are those of one context."""

    def __init__(self, module: nn.Module, num_positions: int, context: int) -> None:
        """`num_positions`: as many as may be asked for. `context`: the tokens of that context, at least as many."""
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
        """For all positions; None where what it gives is not by position."""
        position_ids = torch.arange(self._positions, device=x.device)[None]
        if self._context > self._positions:  # the class takes its last position for the context's end
            position_ids = torch.cat((position_ids, position_ids.new_tensor([[self._context - 1]])), dim=1)
        output = self._module(x, position_ids, *args, **kwargs)
        parts = output if isinstance(output, tuple) else (output,)
        by_position = all(isinstance(each, Tensor) and each.shape[:2] == position_ids.shape for each in parts)
        return tuple(each[:, : self._positions] for each in parts) if by_position else None


def is_rotary(module: nn.Module) -> bool:
    """Whether it gives rotations for (x, position_ids)."""
    names = list(inspect.signature(module.forward).parameters)
    return "Rotary" in type(module).__name__ and names[:2] == ["x", "position_ids"]


class StepPositionInjector(nn.Module):
    """A table of positions that a class looks up by counting from the length of what is cached: it gets those of the
    step's tokens in their place."""

    def __init__(self, module: nn.Module, positions: Callable[[], Tensor]) -> None:
        super().__init__()
        self._module, self._get_step_positions = module, positions

    def forward(self, *args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        return self._module(*args, position_ids=self._get_step_positions().view(position_ids.shape), **kwargs)


def has_positions_from_cache_length(module: nn.Module) -> bool:
    """Whether it looks up positions by a length."""
    names = inspect.signature(module.forward).parameters
    lengths = {"cache_length", "past_key_values_length"}  # the second up to transformers 5.23
    return "Positional" in type(module).__name__ and "position_ids" in names and not lengths.isdisjoint(names)
