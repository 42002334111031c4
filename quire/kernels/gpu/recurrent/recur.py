"""`Operations.recur` by the Triton kernels beside it. No call waits for the device, and every grid follows from shapes,
so that a CUDA graph holds it.

Tokens are computed one after the other; where bits may depend on how a prompt was cut, long prompts of delta rules and
state spaces by pieces of 64 tokens. Which sequences of a step these are the device decides."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.recurrent.pieces import LONG, advance_by_pieces, are_for
from quire.kernels.gpu.recurrent.triton_delta_rule import advance_delta
from quire.kernels.gpu.recurrent.triton_rows import finish, keep_guesses
from quire.kernels.gpu.recurrent.triton_selective_scan import advance_scan
from quire.kernels.gpu.recurrent.triton_state_space import advance_space
from quire.kernels.gpu.triton_sizes import cdiv, is_consumers_blackwell, power_of_2
from quire.kernels.recurrent.delta_rule import EPSILON, DeltaRule
from quire.kernels.recurrent.recurrence import Matrices, Recurrence
from quire.kernels.recurrent.selective_scan import SelectiveScan
from quire.kernels.recurrent.state_space import StateSpace

_NUMBERS, _FIXED_NUMBERS = 4096, 2048
"""Of a matrix, at most, that a program of one warp has: 128 registers of each thread. In an H100's decodes 32 columns,
whose rows are 128 bytes, move two to three times the bytes of 8; where the same kernel computes long prompts too, whose
tokens wait for each other, 16 are between."""
_MOST_COLUMNS = 32
_LONG_KEY = 256
"""Numbers of a key, as Falcon H1's, with which a GPU of compute capability 12.0 spills registers with more columns."""
_KEPT_AT_ONCE = 1024
_GATED_AT_ONCE = 1024
assert EPSILON == 1e-6, "what advance_delta adds"

Known = DeltaRule | StateSpace | SelectiveScan


def recur(
    given: Tensor,
    z: Tensor,
    beside: Tensor,
    rule: Recurrence,
    states: Matrices,
    metadata: AttentionMetadata,
    *,
    fixed: bool,
) -> Tensor:
    """fixed: bits do not depend on how sequences were cut into steps."""
    assert isinstance(rule, Known), f"no kernel for {type(rule).__name__}"
    given, z, beside = given.contiguous(), z.contiguous(), beside.contiguous()
    out = torch.empty_like(z)
    if not len(given):
        return out
    assert metadata.state_slots is not None
    value, most = states.matrices.shape[3], states.guesses.shape[1]
    read = torch.empty((len(given), rule.heads, value), dtype=torch.float32, device=given.device)
    of = metadata if metadata.sequences is None else metadata.sequences
    guesses = of.guesses if most else None
    bounds = (of.context_lens,) * 2 if guesses is None else (guesses.seen, guesses.known)
    where = (of.query_start, of.context_lens, *bounds, metadata.state_slots)
    asked = (int(guesses is not None), 0)
    if not fixed and not isinstance(rule, SelectiveScan) and are_for(rule, given, metadata.max_query_len):
        asked = (asked[0], LONG)
        decodes = len(metadata.parts[0].context_lens) if metadata.parts else 0
        advance_by_pieces(read, (given, beside), rule, states, where, asked, decodes)
    _advance(read, (given, beside), rule, states, where, asked, fixed=fixed)
    if guesses is not None:
        sizes = (rule.inputs, rule.beside, most, _KEPT_AT_ONCE)
        keep_guesses[len(where[1]), most](states.guesses, given, beside, *where, *sizes, num_warps=4)
    _finish(out, read, z, rule, value)
    return out


def _advance(
    read: Tensor,
    numbers: tuple[Tensor, Tensor],
    rule: Known,
    states: Matrices,
    where: tuple[Tensor, ...],
    asked: tuple[int, int],
    *,
    fixed: bool,
) -> None:
    """asked: whether there are guesses; from how many tokens on others compute a sequence, 0: they compute none."""
    value, most = states.matrices.shape[3], states.guesses.shape[1]
    key = power_of_2(rule.key)
    few = fixed or (key >= _LONG_KEY and is_consumers_blackwell(read.device.index))
    block = min(power_of_2(value), max((_FIXED_NUMBERS if few else _NUMBERS) // key, 1), _MOST_COLUMNS)
    grid = (len(where[1]), rule.heads, cdiv(value, block))
    tensors = (read, states.matrices, *numbers, states.guesses, rule.rate, rule.shift)
    sizes = (rule.heads, rule.key, key, value)
    if isinstance(rule, DeltaRule):
        advance_delta[grid](*tensors, *where, *asked, rule.key_heads, *sizes, most, block, num_warps=1)
    elif isinstance(rule, StateSpace):
        given = (*tensors, rule.skip, *where, *asked, *rule.limits)
        advance_space[grid](*given, rule.groups, *sizes, most, block, num_warps=1)
    else:
        norms = [rule.skip if each is None else each for each in (rule.write_norm, rule.read_norm)]
        given = (*tensors, rule.skip, *norms, *where, asked[0], rule.eps)
        advance_scan[grid](*given, *sizes, rule.write_norm is not None, most, block, num_warps=1)


def _finish(out: Tensor, read: Tensor, z: Tensor, rule: Known, value: int) -> None:
    total = read.numel()
    if isinstance(rule, SelectiveScan) or rule.norm is None:
        grid, sizes = (cdiv(total, _GATED_AT_ONCE),), (_GATED_AT_ONCE, 1, _GATED_AT_ONCE)
        finish[grid](out, read, z, read, total, 0.0, *sizes, False, False, False, num_warps=4)
        return
    of_delta = isinstance(rule, DeltaRule)
    pieces = 1 if isinstance(rule, DeltaRule) else rule.groups
    size = value if isinstance(rule, DeltaRule) else rule.heads // rule.groups * value
    block = power_of_2(size)
    first = of_delta or (isinstance(rule, StateSpace) and rule.norm_first)
    warps = min(16, max(1, block // 512))
    finish[total // size,](
        out, read, z, rule.norm, total, rule.eps, size, pieces, block, True, first, not of_delta, num_warps=warps
    )
