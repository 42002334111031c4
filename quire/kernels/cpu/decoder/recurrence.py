from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.recurrent.recurrence import Recurrence, RecurrentStates
from quire.kernels.recurrent.selective_scan import SelectiveScan
from quire.kernels.recurrent.state_space import StateSpace

COMPILED_RULES = (DeltaRule, StateSpace, SelectiveScan)
"""Other rules run on the reference."""


class RecurrenceKernelArguments(NamedTuple):
    kernel: str
    weights: tuple[Tensor | None, ...]
    sizes: tuple[int, int, int, int]
    """(groups of heads, heads, key dimension, value dimension)."""
    rules: tuple[float, ...]


def recurrence_kernel_arguments(rule: Recurrence) -> RecurrenceKernelArguments:
    match rule:
        case DeltaRule():
            sizes = (rule.num_key_heads, rule.num_heads, rule.key_dim, rule.value_dim)
            rules = (rule.eps, rule.has_row_decay, rule.has_sigmoid_gate)
            return RecurrenceKernelArguments(
                "delta_rule", (rule.decay_rate, rule.dt_bias, rule.norm_weight), sizes, rules
            )
        case StateSpace():
            weights = (rule.decay_rate, rule.dt_bias, rule.skip, rule.norm_weight)
            sizes = (rule.num_groups, rule.num_heads, rule.key_dim, rule.value_dim)
            return RecurrenceKernelArguments(
                "state_space", weights, sizes, (rule.eps, *rule.dt_limits, rule.norm_before_gate)
            )
        case SelectiveScan():
            read = (rule.decay_rate, rule.dt_bias, rule.skip, rule.b_norm, rule.c_norm)
            return RecurrenceKernelArguments(
                "selective_scan", read, (1, rule.num_heads, rule.key_dim, rule.value_dim), (rule.eps,)
            )
    raise TypeError(f"no kernel computes a {type(rule).__name__}")


def check_recurrence(rule: Recurrence, states: RecurrentStates, dtype: torch.dtype) -> None:
    """Raises TypeError or ValueError if the kernels do not support these dtypes, sizes or strides."""
    _, weights, (groups, heads, key, value), _ = recurrence_kernel_arguments(rule)
    wide = [states.matrices, *(each for each in weights if each is not None)]
    if any(each.dtype != torch.float32 for each in wide):
        raise TypeError("a recurrence's weights and matrices must be float32")
    if states.draft_inputs.dtype != dtype:
        raise TypeError(f"guesses of {states.draft_inputs.dtype} cannot serve {dtype}")
    if not all(each.is_contiguous() for each in (*wide, states.draft_inputs)):
        raise ValueError("the inputs and states of a recurrence must be contiguous")
    if value % 16 or key % 2 or heads % groups:
        raise ValueError("a value must have a multiple of 16 numbers, a key an even number, and groups as many heads")
