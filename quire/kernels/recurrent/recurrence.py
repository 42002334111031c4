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
class Matrices:
    """What a layer keeps of sequences, by slot."""

    matrices: Tensor
    """[slots, heads, key, value] float32"""
    guesses: Tensor
    """[slots, most guesses, kept] of the type of what is given: that of position p at p % most guesses"""


@dataclass(frozen=True, slots=True)
class Guesses:
    """Which tokens of a step's sequences are guesses, or were some in the step before."""

    seen: Tensor
    """[S] int32: so many tokens the matrices have seen. Those behind them up to the step's own were guesses, which the
    slot keeps and which turned out right."""
    known: Tensor
    """[S] int32: so many tokens are no guesses; the others, the last ones, may turn out wrong."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """A step's sequences, as AttentionMetadata has them. Where attention has a row for each token, a slot's rows, which
    stand side by side, are one of them, in the place of the first; in the others' places are empty ones."""

    query_start: Tensor
    context_lens: Tensor
    guesses: Guesses | None


class Recurrence(ABC):
    """A rule by which a token changes the matrices, and what becomes of what it reads."""

    __slots__ = ()

    @property
    @abstractmethod
    def inputs(self) -> int:
        """Numbers of a token that go into the matrices, or read them."""

    @property
    @abstractmethod
    def beside(self) -> int:
        """Numbers of a token beside them, as many for each head."""

    @property
    def kept(self) -> int:
        """Numbers that are kept of a guess."""
        return self.inputs + self.beside

    @abstractmethod
    def advance(self, numbers: Tensor, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices [heads, key, value] behind a token that gives these numbers [kept], and what it reads [heads,
        value]. One token at a time: PyTorch's functions of many numbers at once give bits that depend on how many
        these are."""

    @abstractmethod
    def result(self, read: Tensor, z: Tensor) -> Tensor:
        """What comes of it [heads * value], with the token's gates z, in their type."""


def recur(
    given: Tensor, z: Tensor, beside: Tensor, rule: Recurrence, states: Matrices, rows: Sequences, slots_of: Tensor
) -> Tensor:
    """Operations.recur; slots_of [S]: of the sequences. Raises IndexError for more guesses than a slot keeps."""
    numbers, firsts = torch.cat([given, beside], dim=1), rows.context_lens - rows.query_start.diff()
    guesses = rows.guesses or Guesses(firsts, rows.context_lens)
    each = (rows.query_start, rows.context_lens, guesses.seen, guesses.known, slots_of)
    starts, contexts, seen_lens, known_lens, slots = (tensor.tolist() for tensor in each)
    found = list[Tensor]()
    for s, (context, *bounds, slot) in enumerate(zip(contexts, seen_lens, known_lens, slots, strict=True)):
        found += _row(numbers[starts[s] : starts[s + 1]], rule, states, slot, context, *bounds)
    return torch.stack([rule.result(read, gates) for read, gates in zip(found, z, strict=True)])


def _row(
    given: Tensor, rule: Recurrence, states: Matrices, slot: int, context: int, seen: int, known: int
) -> list[Tensor]:
    """What the last tokens read of a sequence of `context` tokens, `known` of which are no guesses; the matrices have
    seen the first `seen`."""
    first, most = context - len(given), states.guesses.shape[1]
    stop = min(max(known, seen), context)
    if not 0 <= first - seen <= most or context - stop > most:
        raise IndexError("more guesses than a slot keeps")
    before = [states.guesses[slot, at % most] for at in range(seen, first)]
    matrices = states.matrices[slot] if first else torch.zeros_like(states.matrices[slot])
    found = []
    for at, numbers in enumerate([*before, *given], seen):
        if at == stop:
            states.matrices[slot] = matrices
        matrices, read = rule.advance(numbers, matrices)
        if at >= first:
            found.append(read)
    if stop == context:
        states.matrices[slot] = matrices
    for at in range(max(stop, first), context):
        states.guesses[slot, at % most] = given[at - first]
    return found


def wide(numbers: Tensor) -> Tensor:
    """In the type of the arithmetic."""
    return numbers.to(torch.float64 if numbers.dtype == torch.float64 else torch.float32)
