"""Computes long prompts in chunks, unless bits must not depend on how prompts are divided into steps."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.recurrent.chunked_recurrence import MIN_CHUNKED_TOKENS, advance_chunked, can_run_chunked
from quire.kernels.gpu.recurrent.triton_common import norm_and_gate, store_draft_inputs
from quire.kernels.gpu.recurrent.triton_delta_rule import advance_delta
from quire.kernels.gpu.recurrent.triton_selective_scan import advance_scan
from quire.kernels.gpu.recurrent.triton_state_space import advance_space
from quire.kernels.gpu.triton_launch_sizes import cdiv, is_consumer_blackwell, next_power_of_2
from quire.kernels.recurrent.delta_rule import L2_NORM_EPS, DeltaRule
from quire.kernels.recurrent.recurrence import Recurrence, RecurrentStates
from quire.kernels.recurrent.selective_scan import SelectiveScan
from quire.kernels.recurrent.state_space import StateSpace

_MAX_MATRIX_ELEMENTS, _FIXED_MATRIX_ELEMENTS = 4096, 2048
"""Elements of a matrix per warp, which has at most 128 registers per thread. In an H100's decodes 32 columns (rows of
128 bytes) move two to three times the bytes per second of 8. The fixed number, 16 columns, is a compromise if the
kernel also computes long prompts.
"""
_MAX_COLUMNS = 32
_LARGE_KEY_DIM = 256
"""The key dimension of Falcon H1, from which on compute capability 12.0 would spill registers with more columns."""
_DRAFT_BLOCK = 1024
_GATE_BLOCK = 1024
assert L2_NORM_EPS == 1e-6, "what advance_delta adds"

SupportedRule = DeltaRule | StateSpace | SelectiveScan


def run_recurrence(
    inputs: Tensor,
    z: Tensor,
    head_inputs: Tensor,
    rule: Recurrence,
    states: RecurrentStates,
    metadata: AttentionMetadata,
    *,
    fixed: bool,
    passed_chunk_trial: bool = False,
) -> Tensor:
    """If `fixed`, bits do not depend on how sequences are divided into steps. `passed_chunk_trial`: chunks passed their
    trial on this GPU; Hopper needs no trial.
    """
    assert isinstance(rule, SupportedRule), f"no kernel for {type(rule).__name__}"
    inputs = inputs.contiguous()
    z = z.contiguous()
    head_inputs = head_inputs.contiguous()
    out = torch.empty_like(z)
    if not len(inputs):
        return out
    assert metadata.state_slots is not None
    value, most = states.matrices.shape[3], states.draft_inputs.shape[1]
    read = torch.empty((len(inputs), rule.num_heads, value), dtype=torch.float32, device=inputs.device)
    sequences = metadata if metadata.recurrence_metadata is None else metadata.recurrence_metadata
    guesses = sequences.state_and_verified_counts if most else None
    bounds = (
        (sequences.context_lens,) * 2 if guesses is None else (guesses.num_state_tokens, guesses.num_verified_tokens)
    )
    sequence_tensors = (sequences.query_start, sequences.context_lens, *bounds, metadata.state_slots)
    kernel_flags = (int(guesses is not None), 0)
    if (
        not fixed
        and not isinstance(rule, SelectiveScan)
        and can_run_chunked(rule, inputs, metadata.max_query_len, passed_trial=passed_chunk_trial)
    ):
        kernel_flags = (kernel_flags[0], MIN_CHUNKED_TOKENS)
        decodes = len(metadata.decode_prefill_parts[0].context_lens) if metadata.decode_prefill_parts else 0
        advance_chunked(read, (inputs, head_inputs), rule, states, sequence_tensors, kernel_flags, decodes)
    _advance_states(read, (inputs, head_inputs), rule, states, sequence_tensors, kernel_flags, fixed=fixed)
    if guesses is not None:
        sizes = (rule.input_dim, rule.head_inputs_dim, most, _DRAFT_BLOCK)
        store_draft_inputs[len(sequence_tensors[1]), most](
            states.draft_inputs, inputs, head_inputs, *sequence_tensors, *sizes, num_warps=4
        )
    _gate_outputs(out, read, z, rule, value)
    return out


def _advance_states(
    read: Tensor,
    numbers: tuple[Tensor, Tensor],
    rule: SupportedRule,
    states: RecurrentStates,
    sequence_tensors: tuple[Tensor, ...],
    kernel_flags: tuple[int, int],
    *,
    fixed: bool,
) -> None:
    value, most = states.matrices.shape[3], states.draft_inputs.shape[1]
    key = next_power_of_2(rule.key_dim)
    few = fixed or (key >= _LARGE_KEY_DIM and is_consumer_blackwell(read.device.index))
    block = min(
        next_power_of_2(value), max((_FIXED_MATRIX_ELEMENTS if few else _MAX_MATRIX_ELEMENTS) // key, 1), _MAX_COLUMNS
    )
    grid = (len(sequence_tensors[1]), rule.num_heads, cdiv(value, block))
    tensors = (read, states.matrices, *numbers, states.draft_inputs, rule.decay_rate, rule.dt_bias)
    sizes = (rule.num_heads, rule.key_dim, key, value)
    if isinstance(rule, DeltaRule):
        advance_delta[grid](
            *tensors,
            *sequence_tensors,
            *kernel_flags,
            rule.num_key_heads,
            *sizes,
            most,
            block,
            rule.has_row_decay,
            num_warps=1,
        )
    elif isinstance(rule, StateSpace):
        kernel_inputs = (*tensors, rule.skip, *sequence_tensors, *kernel_flags, *rule.dt_limits)
        advance_space[grid](*kernel_inputs, rule.num_groups, *sizes, most, block, num_warps=1)
    else:
        norms = [rule.skip if each is None else each for each in (rule.b_norm, rule.c_norm)]
        kernel_inputs = (*tensors, rule.skip, *norms, *sequence_tensors, kernel_flags[0], rule.eps)
        advance_scan[grid](*kernel_inputs, *sizes, rule.b_norm is not None, most, block, num_warps=1)


def _gate_outputs(out: Tensor, read: Tensor, z: Tensor, rule: SupportedRule, value: int) -> None:
    total = read.numel()
    if isinstance(rule, SelectiveScan) or rule.norm_weight is None:
        grid, sizes = (cdiv(total, _GATE_BLOCK),), (_GATE_BLOCK, 1, _GATE_BLOCK)
        norm_and_gate[grid](out, read, z, read, total, 0.0, *sizes, False, False, False, False, num_warps=4)
        return
    of_delta = isinstance(rule, DeltaRule)
    pieces = 1 if isinstance(rule, DeltaRule) else rule.num_groups
    size = value if isinstance(rule, DeltaRule) else rule.num_heads // rule.num_groups * value
    block = next_power_of_2(size)
    first = of_delta or (isinstance(rule, StateSpace) and rule.norm_before_gate)
    warps = min(16, max(1, block // 512))
    flags = (True, first, not of_delta, isinstance(rule, DeltaRule) and rule.has_sigmoid_gate)
    norm_and_gate[total // size,](
        out, read, z, rule.norm_weight, total, rule.eps, size, pieces, block, *flags, num_warps=warps
    )
