"""Recurrent states with one matrix per head.

This module computes tokens one by one, so bits do not depend on how a sequence is divided into steps. On GPUs, kernels
may compute long prompts in chunks. A slot keeps the matrices after the last verified token, and the inputs of draft
tokens. A later step applies the accepted draft tokens before its own tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecurrentStates:
    matrices: Tensor
    """[slots, heads, key, value] float32"""
    draft_inputs: Tensor
    """[slots, max drafts, draft_inputs_dim] in the input dtype; position p is at p % max drafts"""


@dataclass(frozen=True, slots=True)
class StateAndVerifiedCounts:
    num_state_tokens: Tensor
    """[S] int32: number of tokens that the matrices include. The slot keeps the inputs of the accepted draft tokens
    between these and the step's tokens.
    """
    num_verified_tokens: Tensor
    """[S] int32: number of tokens before the first draft token of this step."""


@dataclass(frozen=True, slots=True)
class RecurrenceMetadata:
    """See AttentionMetadata. If attention has one row per token, a slot's consecutive rows form one sequence here, in
    the first row's place. The other rows' places are empty.
    """

    query_start: Tensor
    context_lens: Tensor
    state_and_verified_counts: StateAndVerifiedCounts | None


class Recurrence(ABC):
    __slots__ = ()

    @property
    @abstractmethod
    def input_dim(self) -> int:
        """Number of elements of `inputs` per token. They update or read the matrices."""

    @property
    @abstractmethod
    def head_inputs_dim(self) -> int:
        """Number of elements of `head_inputs` per token, over all heads. Each head has equally many."""

    @property
    def draft_inputs_dim(self) -> int:
        return self.input_dim + self.head_inputs_dim

    @abstractmethod
    def advance_and_read_state(self, numbers: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """Apply one token's elements [draft_inputs_dim]. Return new matrices [heads, key, value] and the readout
        [heads, value]. Tokens are applied one at a time, because bits of PyTorch's elementwise functions depend on the
        length.
        """

    @abstractmethod
    def gate_readout(self, read: Tensor, z: Tensor) -> Tensor:
        """Return [heads * value] in z's dtype."""


def run_recurrence(
    inputs: Tensor,
    z: Tensor,
    head_inputs: Tensor,
    rule: Recurrence,
    states: RecurrentStates,
    sequences: RecurrenceMetadata,
    slots_of: Tensor,
) -> Tensor:
    """slots_of [S] are the sequences' slots. Raises IndexError for more draft tokens than a slot keeps."""
    numbers, firsts = torch.cat([inputs, head_inputs], dim=1), sequences.context_lens - sequences.query_start.diff()
    guesses = sequences.state_and_verified_counts or StateAndVerifiedCounts(firsts, sequences.context_lens)
    each = (
        sequences.query_start,
        sequences.context_lens,
        guesses.num_state_tokens,
        guesses.num_verified_tokens,
        slots_of,
    )
    starts, contexts, seen_lens, known_lens, slots = (tensor.tolist() for tensor in each)
    readouts = list[Tensor]()
    for s, (context, *bounds, slot) in enumerate(zip(contexts, seen_lens, known_lens, slots, strict=True)):
        readouts += _run_sequence(numbers[starts[s] : starts[s + 1]], rule, states, slot, context, *bounds)
    return torch.stack([rule.gate_readout(read, gates) for read, gates in zip(readouts, z, strict=True)])


def _run_sequence(
    inputs: Tensor, rule: Recurrence, states: RecurrentStates, slot: int, context: int, seen: int, known: int
) -> list[Tensor]:
    """The first `known` of its `context` tokens are verified, and the matrices include the first `seen`."""
    first, most = context - len(inputs), states.draft_inputs.shape[1]
    stop = min(max(known, seen), context)
    if not 0 <= first - seen <= most or context - stop > most:
        raise IndexError("more draft tokens than a slot has room for")
    before = [states.draft_inputs[slot, at % most] for at in range(seen, first)]
    matrices = states.matrices[slot] if first else torch.zeros_like(states.matrices[slot])
    readouts = []
    for at, numbers in enumerate([*before, *inputs], seen):
        if at == stop:
            states.matrices[slot] = matrices
        matrices, read = rule.advance_and_read_state(numbers, matrices)
        if at >= first:
            readouts.append(read)
    if stop == context:
        states.matrices[slot] = matrices
    for at in range(max(stop, first), context):
        states.draft_inputs[slot, at % most] = inputs[at - first]
    return readouts


def to_compute_dtype(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float64 if numbers.dtype == torch.float64 else torch.float32)
