"""Long prompts by the kernels of triton_chunks.py: which they serve, and their launches. Grids follow from shapes, so
that a CUDA graph holds them; which sequences of a step are long the device decides."""

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
"""Tokens of a sequence that is computed so, or more."""
_MAX_KEY_DIM = 128
"""Numbers of a key: more were not proven."""
_COLUMN_BLOCK, _PIPELINE_STAGES = 32, 3
"""Of a head's matrix in a program: of one prompt and 32 heads of 128 columns nearly each of an H100's processors has
one. Of so many pieces what they take lies in shared memory, up to 218 of its 227 KB."""


def can_run_chunked(rule: DeltaRule | StateSpace, inputs: Tensor, longest: int) -> bool:
    """Whether a rule's tokens can be computed so, and a sequence of this many may be long. Other GPUs have less shared
    memory, or other products, and were not tried."""
    able = inputs.dtype == torch.bfloat16 and rule.key_dim <= _MAX_KEY_DIM
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
    """numbers: what tokens give, and beside it. where: query_start, context_lens, seen, known and slots of sequences.
    asked: whether there are guesses, and LONG. decodes: so many sequences, the first ones, are not long."""
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
