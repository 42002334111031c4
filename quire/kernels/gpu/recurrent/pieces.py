"""Long prompts by the kernels of triton_pieces.py: which they serve, and their launches. Grids follow from shapes, so
that a CUDA graph holds them; which sequences of a step are long the device decides."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

from quire.kernels.gpu import triton_sizes
from quire.kernels.gpu.recurrent.triton_pieces import PIECE, advance_pieces, solve_delta, weigh_delta, weigh_space
from quire.kernels.gpu.triton_sizes import cdiv, power_of_2
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.recurrent.recurrence import Matrices
from quire.kernels.recurrent.state_space import StateSpace

LONG = 32
"""Tokens of a sequence that is computed so, or more."""
_MOST_KEYS = 128
"""Numbers of a key: more were not proven."""
_COLUMNS, _STAGES = 32, 3
"""Of a head's matrix in a program: of one prompt and 32 heads of 128 columns nearly each of an H100's processors has
one. Of so many pieces what they take lies in shared memory, up to 218 of its 227 KB."""


def are_for(rule: DeltaRule | StateSpace, given: Tensor, longest: int) -> bool:
    """Whether a rule's tokens can be computed so, and a sequence of this many may be long. Other GPUs have less shared
    memory, or other products, and were not tried."""
    able = given.dtype == torch.bfloat16 and rule.key <= _MOST_KEYS
    return able and longest >= LONG and (knobs.runtime.interpret or triton_sizes.is_hopper(given.device.index))


def advance_by_pieces(
    read: Tensor,
    numbers: tuple[Tensor, Tensor],
    rule: DeltaRule | StateSpace,
    states: Matrices,
    where: tuple[Tensor, ...],
    asked: tuple[int, int],
    decodes: int,
) -> None:
    """numbers: what tokens give, and beside it. where: query_start, context_lens, seen, known and slots of sequences.
    asked: whether there are guesses, and LONG. decodes: so many sequences, the first ones, are not long."""
    given, (heads, key, value), seqs = numbers[0], states.matrices.shape[1:], len(where[1]) - decodes
    pieces, delta = len(given) // PIECE + seqs, isinstance(rule, DeltaRule)
    tiles = torch.empty((pieces, heads, 4 if delta else 2, PIECE, PIECE), dtype=torch.bfloat16, device=given.device)
    factors = torch.empty((pieces, heads, 4, PIECE), dtype=torch.float32, device=given.device)
    made, bounds = (tiles, factors, *numbers, rule.rate, rule.shift), (*where[:4], *asked, decodes, seqs)
    pad, block = max(power_of_2(key), 16), max(min(power_of_2(value), _COLUMNS), 16)
    if isinstance(rule, DeltaRule):
        groups, skip, at = rule.key_heads, rule.shift, (0, rule.key_heads * key, 2 * rule.key_heads * key)
        systems = torch.empty((pieces, heads, PIECE, PIECE), dtype=torch.float32, device=given.device)
        weigh_delta[pieces, heads](systems, *made, *bounds, groups, heads, key, pad, value, num_warps=4)
        solve_delta[pieces, heads](tiles, systems, *bounds, heads, num_warps=1)
    else:
        groups, skip, at = rule.groups, rule.skip, (heads * value + rule.groups * key, heads * value, 0)
        weigh_space[pieces, heads](*made, *bounds, *rule.limits, groups, heads, key, pad, value, num_warps=4)
    shape = (rule.inputs, *at, heads // groups, heads, key, pad, value, block, _STAGES)
    tensors = (read, states.matrices, tiles, factors, given, skip)
    advance_pieces[seqs, heads, cdiv(value, block)](*tensors, *where, *asked, decodes, delta, *shape, num_warps=4)
