"""Recurrent states for tests: rows of sequences, given to a backend step by step and cut at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Backend
from quire.kernels.recurrent.recurrence import Recurrence, RecurrentStates, StateAndVerifiedCounts

SLOTS = 5
CPU = torch.device("cpu")


class Row(NamedTuple):
    numbers: Tensor
    """The sequence's inputs up to the end of what is computed."""
    first: int
    seen: int
    known: int
    slot: int


class Shape(NamedTuple):
    """Sizes of a rule's state matrices."""

    rule: Recurrence
    heads: int
    key: int
    value: int


def given(shape: Shape, tokens: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """A token's inputs side by side: those of the matrices, the gates, and the head inputs."""
    rule = shape.rule
    width = rule.input_dim + shape.heads * shape.value + rule.head_inputs_dim
    return torch.randn((tokens, width), generator=generator).to(dtype)


def parts(shape: Shape, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rule = shape.rule
    inputs, z, beside = numbers.split([rule.input_dim, shape.heads * shape.value, rule.head_inputs_dim], dim=1)
    return inputs, z, beside


@dataclass
class Kept:
    """The states of a layer; NaN until written."""

    backend: Backend
    shape: Shape
    dtype: torch.dtype
    drafts: int = 0
    device: torch.device = CPU

    def __post_init__(self) -> None:
        rule, wide = self.shape.rule, torch.float64 if self.dtype == torch.float64 else torch.float32
        matrices = torch.full((SLOTS, *self.shape[1:]), torch.nan, dtype=wide, device=self.device)
        kept = torch.full((SLOTS, self.drafts, rule.draft_inputs_dim), torch.nan, dtype=self.dtype, device=self.device)
        self.states = RecurrentStates(matrices, kept)

    def step(self, rows: list[Row]) -> list[Tensor]:
        counts = [len(row.numbers) - row.first for row in rows]
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        lens = torch.tensor([[len(row.numbers), row.seen, row.known] for row in rows], dtype=torch.int32).T.contiguous()
        slots = torch.tensor([row.slot for row in rows])
        unused = torch.zeros((len(rows), 1), dtype=torch.int32)
        starts, *lens, unused, slots = (each.to(self.device) for each in (starts, *lens, unused, slots))
        where = (starts, lens[0], starts, unused, slots, slots, max(counts), max(len(row.numbers) for row in rows))
        metadata = AttentionMetadata(
            *where, state_slots=slots, state_and_verified_counts=StateAndVerifiedCounts(lens[1], lens[2])
        )
        if all(row.seen == row.first and row.known == len(row.numbers) for row in rows):
            metadata = replace(metadata, state_and_verified_counts=None)
        numbers = torch.cat([row.numbers[row.first :] for row in rows]).to(self.device)
        found = self.backend.run_recurrence(*parts(self.shape, numbers), self.shape.rule, self.states, metadata)
        return list(found.cpu().split(counts))


def on(shape: Shape, device: torch.device) -> Shape:
    """The rule with its weights on `device`."""
    rule: Any = shape.rule
    there = {each.name: getattr(rule, each.name) for each in fields(rule)}
    moved = {name: value.to(device) for name, value in there.items() if isinstance(value, Tensor)}
    return shape._replace(rule=replace(rule, **moved))


def whole(backend: Backend, shape: Shape, numbers: Tensor, device: torch.device = CPU) -> Tensor:
    """The outputs of a sequence that is computed at once."""
    kept = Kept(backend, shape, numbers.dtype, device=device)
    return kept.step([Row(numbers, 0, 0, len(numbers), 0)])[0]


def cut_at_random(
    backend: Backend, shape: Shape, dtype: torch.dtype, seed: int, device: torch.device = CPU, most: int = 80
) -> None:
    """Compute several sequences together in random chunks, with drafts of which some are right. The results must equal
    those of each sequence alone; each next step begins after the accepted drafts.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    drafts = rng.randrange(6)
    kept = Kept(backend, shape, dtype, drafts, device)
    numbers = [given(shape, rng.randrange(20, most), generator, dtype) for _ in range(3)]
    alone = [whole(backend, shape, each, device) for each in numbers]
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
