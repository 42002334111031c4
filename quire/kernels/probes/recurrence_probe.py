from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Backend
from quire.kernels.probes.backend_probe import BackendProbe, check_graph_replay, is_close
from quire.kernels.recurrent.recurrence import RecurrentStates, StateAndVerifiedCounts
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv
from quire.kernels.reference import ReferenceBackend

_TOKEN_COUNTS = (70, 2)
"""Tokens of two sequences in the first step, in slots 2 and 0. Sequence 0 is long enough for chunks. The second step
has one token and two drafts of sequence 0, and one token of sequence 1. The third step has a token of each sequence,
after one draft was accepted.
"""
_NUM_DRAFTS = 2
_CONV_WIDTH = 4


@dataclass(frozen=True, slots=True)
class RecurrenceProbe(BackendProbe):
    """The reference also rounds the convolution's output and the result, because unrounded inputs change some results
    of large state spaces by more than a useful tolerance.
    """

    rule: Any
    value_dim: int

    def find_mismatch(self, backend: Backend) -> str | None:
        numbers, cpu = self._random_inputs(), torch.device("cpu")
        mine = _ProbeLayer(backend, self.rule, self.value_dim, self.device, self.dtype)
        judge = _ProbeLayer(ReferenceBackend(), move_tensors(self.rule, cpu), self.value_dim, cpu, self.dtype)
        first, second = _TOKEN_COUNTS
        steps = (
            ("a prompt", make_step_metadata([0, 0], _TOKEN_COUNTS, [0, 0], _TOKEN_COUNTS)),
            ("guesses", make_step_metadata([first, second], (first + 3, 3), [first, second], (first + 1, 3))),
            (
                "a step after draft tokens",
                make_step_metadata([first + 2, 3], (first + 3, 4), [first + 1, 3], (first + 3, 4)),
            ),
        )
        for what, metadata in steps:
            if not is_close(mine.run_probe_step(numbers, metadata), judge.run_probe_step(numbers, metadata)):
                return f"differs from the reference for {what} of a {type(self.rule).__name__}"
        last = make_step_metadata([first + 3, 4], (first + 4, 5), None, None)
        decode = mine.make_step_function(numbers, last)
        if self.capture is None:
            return None
        before = [each.clone() for each in mine.state_tensors]
        expected = judge.run_probe_step(numbers, last)

        def restore_and_run() -> Tensor:
            for each, was in zip(mine.state_tensors, before, strict=True):
                each.copy_(was)
            return decode()

        return check_graph_replay(self.capture, restore_and_run, expected)

    def _random_inputs(self) -> Tensor:
        width = self.rule.input_dim + self.value_dim * self.rule.num_heads + self.rule.head_inputs_dim
        generator = torch.Generator().manual_seed(3)
        return (torch.randn((2, 80, width), generator=generator) / 2).to(self.dtype).float()


def make_step_metadata(
    firsts: list[int], ends: tuple[int, ...], seen: list[int] | None, known: tuple[int, ...] | None
) -> AttentionMetadata:
    counts = [end - first for first, end in zip(firsts, ends, strict=True)]
    at = [position for first, end in zip(firsts, ends, strict=True) for position in range(first, end)]
    lens = torch.tensor(ends, dtype=torch.int32)
    starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    guesses = None
    if seen is not None and known is not None:
        guesses = StateAndVerifiedCounts(torch.tensor(seen, dtype=torch.int32), torch.tensor(known, dtype=torch.int32))
    where = (starts, lens, starts, torch.zeros((2, 1), dtype=torch.int32), torch.tensor(at), torch.tensor(at))
    return AttentionMetadata(
        *where, max(counts), max(ends), state_slots=torch.tensor([2, 0]), state_and_verified_counts=guesses
    )


class _ProbeLayer:
    def __init__(self, backend: Backend, rule: Any, value: int, device: torch.device, dtype: torch.dtype) -> None:
        self._backend = backend
        self._rule = rule
        self._device = device
        self._dtype = dtype
        recent = torch.zeros((3, _CONV_WIDTH - 1 + _NUM_DRAFTS, rule.input_dim), dtype=dtype, device=device)
        matrices = torch.zeros((3, rule.num_heads, rule.key_dim, value), device=device)
        guesses = torch.zeros((3, _NUM_DRAFTS, rule.draft_inputs_dim), dtype=dtype, device=device)
        self.state_tensors = (recent, matrices, guesses)
        weight = torch.linspace(-1.0, 1.0, _CONV_WIDTH * rule.input_dim, device=device).view(_CONV_WIDTH, -1)
        self._conv = ShortConv(weight, None, is_gated=False)

    def run_probe_step(self, numbers: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.make_step_function(numbers, metadata)().cpu().float()

    def make_step_function(self, numbers: Tensor, metadata: AttentionMetadata) -> Callable[[], Tensor]:
        """The returned function reads nothing on the host."""
        there, counts = move_tensors(metadata, self._device), metadata.query_start.diff().tolist()
        firsts = (metadata.context_lens - metadata.query_start.diff()).tolist()
        rows = [
            numbers[at, first : first + count] for at, (first, count) in enumerate(zip(firsts, counts, strict=True))
        ]
        step_inputs = torch.cat(rows).to(self._device, self._dtype)
        sizes = [
            self._rule.input_dim,
            step_inputs.shape[1] - self._rule.input_dim - self._rule.head_inputs_dim,
            self._rule.head_inputs_dim,
        ]
        inputs, z, beside = (each.contiguous() for each in step_inputs.split(sizes, dim=1))
        recent, matrices, guesses = self.state_tensors

        def run_prepared() -> Tensor:
            convolved = self._backend.short_conv(inputs, self._conv, ConvStates(None, 1, recent), there)
            return self._backend.run_recurrence(
                convolved, z, beside, self._rule, RecurrentStates(matrices, guesses), there
            )

        return run_prepared


def move_tensors(instance: Any, device: torch.device) -> Any:
    values = {each.name: getattr(instance, each.name) for each in fields(instance)}
    moved_tensors = {name: each.to(device) for name, each in values.items() if isinstance(each, Tensor)}
    moved_drafts = {
        name: move_tensors(each, device) for name, each in values.items() if isinstance(each, StateAndVerifiedCounts)
    }
    return replace(instance, **moved_tensors, **moved_drafts)
