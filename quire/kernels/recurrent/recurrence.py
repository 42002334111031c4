"""States of sequences that are matrices, one for each head, and how tokens change them, in plain PyTorch: what the
delta rule (delta_rule.py) and selective state spaces (state_space.py) have in common.

Tokens are computed one after the other, so that no bit depends on how a sequence was cut into steps. A slot keeps the
matrices behind the last token that was no guess, and what of guesses the rule takes: a later step applies those that
were right before its own tokens, with the same arithmetic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecurrentStates:
    """What a layer keeps of sequences, by slot."""

    matrices: Tensor
    """[slots, heads, key, value] float32"""
    draft_inputs: Tensor
    """[slots, most guesses, kept] of the type of what is given: that of position p at p % most guesses"""


@dataclass(frozen=True, slots=True)
class StateAndVerifiedCounts:
    """Which tokens of a step's sequences are guesses, or were some in the step before."""

    num_state_tokens: Tensor
    """[S] int32: so many tokens the matrices have seen. Those behind them up to the step's own were guesses, which the
    slot keeps and which turned out right."""
    num_verified_tokens: Tensor
    """[S] int32: so many tokens are no guesses; the others, the last ones, may turn out wrong."""


@dataclass(frozen=True, slots=True)
class RecurrenceMetadata:
    """A step's sequences, as AttentionMetadata has them. Where attention has a row for each token, a slot's rows, which
    stand side by side, are one of them, in the place of the first; in the others' places are empty ones."""

    query_start: Tensor
    context_lens: Tensor
    state_and_verified_counts: StateAndVerifiedCounts | None


class Recurrence(ABC):
    """A rule by which a token changes the matrices, and what becomes of what it reads."""

    __slots__ = ()

    @property
    @abstractmethod
    def input_dim(self) -> int:
        """Numbers of a token that go into the matrices, or read them."""

    @property
    @abstractmethod
    def head_inputs_dim(self) -> int:
        """Numbers of a token beside them, as many for each head."""

    @property
    def draft_inputs_dim(self) -> int:
        """Numbers that are kept of a guess."""
        return self.input_dim + self.head_inputs_dim

    @abstractmethod
    def advance_and_read_state(self, numbers: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices [heads, key, value] behind a token that gives these numbers [kept], and what it reads [heads,
        value]. One token at a time: PyTorch's functions of many numbers at once give bits that depend on how many
        these are."""

    @abstractmethod
    def gate_readout(self, read: Tensor, z: Tensor) -> Tensor:
        """What comes of it [heads * value], with the token's gates z, in their type."""


def run_recurrence(
    inputs: Tensor,
    z: Tensor,
    head_inputs: Tensor,
    rule: Recurrence,
    states: RecurrentStates,
    sequences: RecurrenceMetadata,
    slots_of: Tensor,
) -> Tensor:
    """Operations.run_recurrence; slots_of [S]: of the sequences. Raises IndexError for more guesses than a slot
    keeps."""
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
    """What the last tokens read of a sequence of `context` tokens, `known` of which are no guesses; the matrices have
    seen the first `seen`."""
    first, most = context - len(inputs), states.draft_inputs.shape[1]
    stop = min(max(known, seen), context)
    if not 0 <= first - seen <= most or context - stop > most:
        raise IndexError("more guesses than a slot keeps")
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
    """In the type of the arithmetic."""
    return numbers.to(torch.float64 if numbers.dtype == torch.float64 else torch.float32)
