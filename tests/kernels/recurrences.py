"""A layer's matrices for tests: rows of sequences, given to a backend step by step, and cut at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Backend
from quire.kernels.recurrent.recurrence import Guesses, Matrices, Recurrence

SLOTS = 5


class Row(NamedTuple):
    numbers: Tensor
    """Of the sequence up to the end of what is computed."""
    first: int
    seen: int
    known: int
    slot: int


class Shape(NamedTuple):
    """Of a rule's matrices."""

    rule: Recurrence
    heads: int
    key: int
    value: int


def given(shape: Shape, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """What tokens give side by side: to the matrices, their gates, and beside."""
    rule = shape.rule
    width = rule.inputs + shape.heads * shape.value + rule.beside
    return torch.randn((tokens, width), generator=generator).to(dtype)


def parts(shape: Shape, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rule = shape.rule
    inputs, z, beside = numbers.split([rule.inputs, shape.heads * shape.value, rule.beside], dim=1)
    return inputs, z, beside


@dataclass
class Kept:
    """What a layer keeps, NaN where nobody wrote."""

    backend: Backend
    shape: Shape
    dtype: torch.dtype
    drafts: int = 0

    def __post_init__(self) -> None:
        rule, wide = self.shape.rule, torch.float64 if self.dtype == torch.float64 else torch.float32
        matrices = torch.full((SLOTS, *self.shape[1:]), torch.nan, dtype=wide)
        self.states = Matrices(matrices, torch.full((SLOTS, self.drafts, rule.kept), torch.nan, dtype=self.dtype))

    def step(self, rows: list[Row]) -> list[Tensor]:
        counts = [len(row.numbers) - row.first for row in rows]
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        lens = torch.tensor([[len(row.numbers), row.seen, row.known] for row in rows], dtype=torch.int32).T.contiguous()
        slots = torch.tensor([row.slot for row in rows])
        unused = torch.zeros((len(rows), 1), dtype=torch.int32)
        where = (starts, lens[0], starts, unused, slots, slots, max(counts), int(lens[0].max()))
        metadata = AttentionMetadata(*where, state_slots=slots, guesses=Guesses(lens[1], lens[2]))
        numbers = torch.cat([row.numbers[row.first :] for row in rows])
        found = self.backend.recur(*parts(self.shape, numbers), self.shape.rule, self.states, metadata)
        return list(found.split(counts))


def whole(backend: Backend, shape: Shape, numbers: Tensor) -> Tensor:
    """What a sequence gives that is computed at once."""
    return Kept(backend, shape, numbers.dtype).step([Row(numbers, 0, 0, len(numbers), 0)])[0]


def cut_at_random(backend: Backend, shape: Shape, dtype: torch.dtype, seed: int) -> None:
    """Sequences in chunks beside each other, with guesses of which some are right: their results are as all others',
    and the next step begins behind them."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    drafts = rng.randrange(6)
    kept = Kept(backend, shape, dtype, drafts)
    numbers = [given(shape, rng.randrange(20, 80), generator, dtype) for _ in range(3)]
    alone = [whole(backend, shape, each) for each in numbers]
    done, seen, found = [0] * 3, [0] * 3, [each[:0] for each in alone]
    while any(have < len(each) for have, each in zip(done, numbers, strict=True)):
        rows, ends = [], {}
        for at, each in enumerate(numbers):
            if done[at] == len(each) or rng.random() < 0.3:
                continue
            known = min(done[at] + rng.choice([1, 1, 2, 5, 17, 40]), len(each))
            right = rng.randrange(min(drafts, len(each) - known) + 1)
            wrong = given(shape, rng.randrange(drafts - right + 1), generator, dtype)
            rows.append(Row(torch.cat([each[: known + right], wrong]), done[at], seen[at], known, at))
            ends[at] = known, known + right
        if not rows:
            continue
        for row, got in zip(rows, kept.step(rows), strict=True):
            seen[row.slot], end = ends[row.slot]
            found[row.slot] = torch.cat([found[row.slot], got[: end - row.first]])
            done[row.slot] = end
    for at, got in enumerate(found):
        assert torch.equal(got, alone[at]), f"sequence {at}"
