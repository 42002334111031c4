"""Launches triton_chunks.py for long prompts. The device decides which prompts are long.

The kernels were measured on Hopper. For other GPUs from compute capability 8.0 on, they were compiled and interpreted
but never run, so a trial at the start decides whether they are used (ChunkedRecurrenceProbe).
"""

from __future__ import annotations

from typing import NamedTuple

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
from quire.kernels.recurrent.recurrence import Recurrence, RecurrentStates
from quire.kernels.recurrent.state_space import StateSpace

MIN_CHUNKED_TOKENS = 32
"""Tokens of a sequence."""
_MAX_KEY_DIM, _LARGE_KEY_DIM = 128, 256
"""The larger limit (Falcon H1) holds for state spaces on GPUs other than Hopper; on Hopper it is untested. Delta rules
with such keys would need more shared memory than consumer GPUs have.
"""
_MIN_CAPABILITY = 80
"""Older GPUs have no bfloat16 products."""
_MAX_COLUMNS, _MIN_COLUMNS = 32, 16
_MAX_DELTA_ELEMENTS, _MAX_STATE_SPACE_ELEMENTS = 2048, 4096
"""Key elements times columns of a program. With more, GPUs other than Hopper spill registers."""


class ChunkLaunch(NamedTuple):
    columns: int
    """Of a head's matrix, per program."""
    num_stages: int
    num_warps: int
    key_block: int
    """Elements of keys that `prepare_delta_chunks` loads at a time."""
    inverse_warps: int


def choose_chunk_launch(key_pad: int, value: int, *, is_delta: bool, hopper: bool) -> ChunkLaunch:
    """On Hopper one prompt with 32 heads of 128 columns nearly fills an H100, and stages take up to 218 of its 227 KB
    of shared memory. Elsewhere two stages take up to 83 KB, and 153 of 227 KB on compute capability 10.0; no other GPU
    from 8.0 on has less than 99 KB. Triton 3.6 compiled one stage wrongly.
    """
    most = _MAX_COLUMNS
    if not hopper:
        most = min(most, (_MAX_DELTA_ELEMENTS if is_delta else _MAX_STATE_SPACE_ELEMENTS) // key_pad)
    columns = max(min(next_power_of_2(value), most), _MIN_COLUMNS)
    if hopper:
        return ChunkLaunch(columns, num_stages=3, num_warps=4, key_block=key_pad, inverse_warps=1)
    warps = 8 if key_pad > _MAX_KEY_DIM else 4
    return ChunkLaunch(columns, num_stages=2, num_warps=warps, key_block=min(key_pad, 32), inverse_warps=2)


def has_chunked_kernel(rule: Recurrence, dtype: torch.dtype, *, hopper: bool) -> bool:
    """False for a decay per row (Kimi Linear), which would need other products."""
    if isinstance(rule, DeltaRule):
        fits = not rule.has_row_decay and rule.key_dim <= _MAX_KEY_DIM
    else:
        fits = isinstance(rule, StateSpace) and rule.key_dim <= (_MAX_KEY_DIM if hopper else _LARGE_KEY_DIM)
    return fits and dtype == torch.bfloat16


def needs_chunk_trial(device: int | None) -> bool:
    """True for NVIDIA GPUs that can run the kernels but never did."""
    capability = triton_launch_sizes.cuda_capability(device)
    return capability is not None and capability >= _MIN_CAPABILITY and not triton_launch_sizes.is_hopper(device)


def can_run_chunked(rule: Recurrence, inputs: Tensor, longest: int, *, passed_trial: bool) -> bool:
    """`longest` is in tokens."""
    device = inputs.device.index
    hopper = uses_hopper_sizes(device)
    has_kernel = longest >= MIN_CHUNKED_TOKENS and has_chunked_kernel(rule, inputs.dtype, hopper=hopper)
    return has_kernel and (hopper or (passed_trial and needs_chunk_trial(device)))


def uses_hopper_sizes(device: int | None) -> bool:
    return knobs.runtime.interpret or triton_launch_sizes.is_hopper(device)


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
    pad = max(next_power_of_2(key), 16)
    launch = choose_chunk_launch(pad, value, is_delta=delta, hopper=uses_hopper_sizes(inputs.device.index))
    if isinstance(rule, DeltaRule):
        groups = rule.num_key_heads
        skip = rule.dt_bias
        at = (0, rule.num_key_heads * key, 2 * rule.num_key_heads * key)
        systems = torch.empty(
            (pieces, heads, RECURRENCE_CHUNK, RECURRENCE_CHUNK), dtype=torch.float32, device=inputs.device
        )
        sizes = (groups, heads, key, pad, value, launch.key_block)
        prepare_delta_chunks[pieces, heads](systems, *prepared, *bounds, *sizes, num_warps=launch.num_warps)
        invert_delta_systems[pieces, heads](tiles, systems, *bounds, heads, num_warps=launch.inverse_warps)
    else:
        groups = rule.num_groups
        skip = rule.skip
        at = (heads * value + rule.num_groups * key, heads * value, 0)
        prepare_state_space_chunks[pieces, heads](
            *prepared, *bounds, *rule.dt_limits, groups, heads, key, pad, value, num_warps=launch.num_warps
        )
    shape = (rule.input_dim, *at, heads // groups, heads, key, pad, value, launch.columns, launch.num_stages)
    tensors = (read, states.matrices, tiles, factors, inputs, skip)
    advance_chunks[seqs, heads, cdiv(value, launch.columns)](
        *tensors, *sequence_tensors, *kernel_flags, decodes, delta, *shape, num_warps=launch.num_warps
    )
