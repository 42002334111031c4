"""Tries a rule with matrices on the device, as kernels/probe.py tries attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Backend
from quire.kernels.probe import BackendProbe, replayed, same
from quire.kernels.recurrent.recurrence import Guesses, Matrices
from quire.kernels.recurrent.short_conv import Columns, ShortConv
from quire.kernels.reference import Reference

_COUNTS = (70, 2)
"""Tokens of two sequences, whose slots are 2 and 0: enough for a GPU to compute the first by pieces. Then come two
guesses of the first and one token of the second, and then, with one of the guesses right, a token of each."""
_GUESSES = 2
_WIDTH = 4


@dataclass(frozen=True, slots=True)
class RuleProbe(BackendProbe):
    """Prompts, guesses beside a decode, what becomes of them, and a decode's graph; with a convolution before it. The
    judge rounds what the convolution gives, and the result, to the model's type too: of a state space of 128 numbers
    other numbers in the sums change some results by more than a tolerance that finds faults."""

    rule: Any
    """A Recurrence."""
    value: int
    """Numbers of a head's value."""

    def wrong(self, backend: Backend) -> str | None:
        numbers, cpu = self._numbers(), torch.device("cpu")
        mine = _Kept(backend, self.rule, self.value, self.device, self.dtype)
        judge = _Kept(Reference(), _on(self.rule, cpu), self.value, cpu, self.dtype)
        first, second = _COUNTS
        steps = (
            ("a prompt", _step([0, 0], _COUNTS, [0, 0], _COUNTS)),
            ("guesses", _step([first, second], (first + 3, 3), [first, second], (first + 1, 3))),
            ("a step behind guesses", _step([first + 2, 3], (first + 3, 4), [first + 1, 3], (first + 3, 4))),
        )
        for what, metadata in steps:
            if not same(mine.computed(numbers, metadata), judge.computed(numbers, metadata)):
                return f"computes something else than the reference for {what} of a {type(self.rule).__name__}"
        last = _step([first + 3, 4], (first + 4, 5), None, None)
        decode = mine.decode(numbers, last)
        if self.capture is None:
            return None
        before = [each.clone() for each in mine.tensors]
        expected = judge.computed(numbers, last)

        def from_before() -> Tensor:
            for each, was in zip(mine.tensors, before, strict=True):
                each.copy_(was)
            return decode()

        return replayed(self.capture, from_before, expected)

    def _numbers(self) -> Tensor:
        """What tokens give side by side, as the model's type has it."""
        width = self.rule.inputs + self.value * self.rule.heads + self.rule.beside
        generator = torch.Generator().manual_seed(3)
        return (torch.randn((2, 80, width), generator=generator) / 2).to(self.dtype).float()


def _step(
    firsts: list[int], ends: tuple[int, ...], seen: list[int] | None, known: tuple[int, ...] | None
) -> AttentionMetadata:
    """Of the tokens from `firsts` to `ends` of two sequences."""
    counts = [end - first for first, end in zip(firsts, ends, strict=True)]
    at = [position for first, end in zip(firsts, ends, strict=True) for position in range(first, end)]
    lens = torch.tensor(ends, dtype=torch.int32)
    starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    guesses = None
    if seen is not None and known is not None:
        guesses = Guesses(torch.tensor(seen, dtype=torch.int32), torch.tensor(known, dtype=torch.int32))
    where = (starts, lens, starts, torch.zeros((2, 1), dtype=torch.int32), torch.tensor(at), torch.tensor(at))
    return AttentionMetadata(*where, max(counts), max(ends), state_slots=torch.tensor([2, 0]), guesses=guesses)


class _Kept:
    """What a layer keeps of three slots, and its two operations."""

    def __init__(self, backend: Backend, rule: Any, value: int, device: torch.device, dtype: torch.dtype) -> None:
        self._backend, self._rule, self._device, self._dtype = backend, rule, device, dtype
        recent = torch.zeros((3, _WIDTH - 1 + _GUESSES, rule.inputs), dtype=dtype, device=device)
        matrices = torch.zeros((3, rule.heads, rule.key, value), device=device)
        guesses = torch.zeros((3, _GUESSES, rule.kept), dtype=dtype, device=device)
        self.tensors = (recent, matrices, guesses)
        weight = torch.linspace(-1.0, 1.0, _WIDTH * rule.inputs, device=device).view(_WIDTH, -1)
        self._conv = ShortConv(weight, None, gated=False)

    def computed(self, numbers: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.decode(numbers, metadata)().cpu().float()

    def decode(self, numbers: Tensor, metadata: AttentionMetadata) -> Callable[[], Tensor]:
        """A function that computes the step, and reads nothing on the host."""
        there, counts = _on(metadata, self._device), metadata.query_start.diff().tolist()
        firsts = (metadata.context_lens - metadata.query_start.diff()).tolist()
        rows = [
            numbers[at, first : first + count] for at, (first, count) in enumerate(zip(firsts, counts, strict=True))
        ]
        given = torch.cat(rows).to(self._device, self._dtype)
        sizes = [self._rule.inputs, given.shape[1] - self._rule.inputs - self._rule.beside, self._rule.beside]
        inputs, z, beside = (each.contiguous() for each in given.split(sizes, dim=1))
        recent, matrices, guesses = self.tensors

        def compute() -> Tensor:
            convolved = self._backend.short_conv(inputs, self._conv, Columns(None, 1, recent), there)
            return self._backend.recur(convolved, z, beside, self._rule, Matrices(matrices, guesses), there)

        return compute


def _on(given: Any, device: torch.device) -> Any:
    """A dataclass, with its tensors there."""
    of = {each.name: getattr(given, each.name) for each in fields(given)}
    there = {name: each.to(device) for name, each in of.items() if isinstance(each, Tensor)}
    within = {name: _on(each, device) for name, each in of.items() if isinstance(each, Guesses)}
    return replace(given, **there, **within)
