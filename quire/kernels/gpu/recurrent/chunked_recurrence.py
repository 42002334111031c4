"""Launches triton_chunks.py for long prompts. The device decides which prompts are long."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

from quire.kernels.gpu import triton_launch_sizes
from quire.kernels.gpu.recurrent.triton_chunks import (
    RECURRENCE_CHUNK,
    advance_chunks,
    invert_delta_systems,
    prepare_delta_chunks,
    prepare_state_space_chunks,
)
from quire.kernels.gpu.triton_launch_sizes import cdiv, next_power_of_2
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.recurrent.recurrence import RecurrentStates
from quire.kernels.recurrent.state_space import StateSpace

MIN_CHUNKED_TOKENS = 32
"""Tokens of a sequence."""
_MAX_KEY_DIM = 128
"""Larger sizes are untested."""
_COLUMN_BLOCK, _PIPELINE_STAGES = 32, 3
"""Columns of a head's matrix per program, and pipeline stages. One prompt with 32 heads of 128 columns nearly fills an
H100. The stages take up to 218 of its 227 KB of shared memory.
"""


def can_run_chunked(rule: DeltaRule | StateSpace, inputs: Tensor, longest: int) -> bool:
    """True only on Hopper, because other GPUs have less shared memory or other products, and are untested. A decay per
    row would need other products. longest: tokens of the longest sequence.
    """
    able = inputs.dtype == torch.bfloat16 and rule.key_dim <= _MAX_KEY_DIM
    able = able and not (isinstance(rule, DeltaRule) and rule.has_row_decay)
    return (
        able
        and longest >= MIN_CHUNKED_TOKENS
        and (knobs.runtime.interpret or triton_launch_sizes.is_hopper(inputs.device.index))
    )


def advance_chunked(
    read: Tensor,
    step_inputs: tuple[Tensor, Tensor],
    rule: DeltaRule | StateSpace,
    states: RecurrentStates,
    sequence_tensors: tuple[Tensor, ...],
    kernel_flags: tuple[int, int],
    decodes: int,
) -> None:
    """sequence_tensors: query_start, context_lens, state and verified counts, slots. kernel_flags: whether there are
    draft tokens, and the minimum tokens of a long sequence. The first `decodes` sequences are not long.
    """
    inputs = step_inputs[0]
    (heads, key, value) = states.matrices.shape[1:]
    seqs = len(sequence_tensors[1]) - decodes
    pieces, delta = len(inputs) // RECURRENCE_CHUNK + seqs, isinstance(rule, DeltaRule)
    tiles = torch.empty(
        (pieces, heads, 4 if delta else 2, RECURRENCE_CHUNK, RECURRENCE_CHUNK),
        dtype=torch.bfloat16,
        device=inputs.device,
    )
    factors = torch.empty((pieces, heads, 4, RECURRENCE_CHUNK), dtype=torch.float32, device=inputs.device)
    prepared, bounds = (
        (tiles, factors, *step_inputs, rule.decay_rate, rule.dt_bias),
        (*sequence_tensors[:4], *kernel_flags, decodes, seqs),
    )
    pad, block = max(next_power_of_2(key), 16), max(min(next_power_of_2(value), _COLUMN_BLOCK), 16)
    if isinstance(rule, DeltaRule):
        groups = rule.num_key_heads
        skip = rule.dt_bias
        at = (0, rule.num_key_heads * key, 2 * rule.num_key_heads * key)
        systems = torch.empty(
            (pieces, heads, RECURRENCE_CHUNK, RECURRENCE_CHUNK), dtype=torch.float32, device=inputs.device
        )
        prepare_delta_chunks[pieces, heads](systems, *prepared, *bounds, groups, heads, key, pad, value, num_warps=4)
        invert_delta_systems[pieces, heads](tiles, systems, *bounds, heads, num_warps=1)
    else:
        groups = rule.num_groups
        skip = rule.skip
        at = (heads * value + rule.num_groups * key, heads * value, 0)
        prepare_state_space_chunks[pieces, heads](
            *prepared, *bounds, *rule.dt_limits, groups, heads, key, pad, value, num_warps=4
        )
    shape = (rule.input_dim, *at, heads // groups, heads, key, pad, value, block, _PIPELINE_STAGES)
    tensors = (read, states.matrices, tiles, factors, inputs, skip)
    advance_chunks[seqs, heads, cdiv(value, block)](
        *tensors, *sequence_tensors, *kernel_flags, decodes, delta, *shape, num_warps=4
    )
