"""Long prompts of delta nets and state spaces, computed in chunks of 64 tokens in Triton: against float64 and the
states of stepwise computation, batched with short sequences. Drafts and deterministic backends use no chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.gpu.recurrent import chunked_recurrence, triton_recurrence
from quire.kernels.gpu.recurrent.chunked_recurrence import MIN_CHUNKED_TOKENS
from quire.kernels.gpu.recurrent.triton_chunks import RECURRENCE_CHUNK
from quire.kernels.gpu.triton_backend import TritonBackend
from quire.kernels.recurrent.delta_rule import DeltaRule
from quire.kernels.reference import ReferenceBackend
from tests.kernels import test_state_space
from tests.kernels.ragged import error
from tests.kernels.recurrences import Kept, Row, Shape, given, on, parts
from tests.kernels.triton.test_recurrent import KINDS, TOLERANCE, Made, space
from tests.tiers import slow

NEAR = 3e-4
"""Error of a state relative to the largest of the stepwise result: a half has 16 bits, a bfloat16 has 8. An H100's sums
are up to 1.1e-4 of the largest result away from float64's.
"""
PIECED = ["delta", "space", *slow("delta of Qwen3.5", "space of Granite, without a norm", "space, normed first")]


@pytest.fixture
def sizes_of_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as on a GPU other than Hopper after its trial, whichever this is."""
    monkeypatch.setattr(chunked_recurrence, "uses_hopper_sizes", lambda device: False)
    monkeypatch.setattr(chunked_recurrence, "needs_chunk_trial", lambda device: True)
    monkeypatch.setattr(TritonBackend, "passed_chunk_trial", True)


@pytest.fixture(params=["hopper", "others"])
def each_gpus_sizes(request: pytest.FixtureRequest) -> None:
    if request.param == "others":
        request.getfixturevalue("sizes_of_other_gpus")


def states_are_close(got: Tensor, wanted: Tensor) -> bool:
    return bool((got.cpu() - wanted.cpu()).abs().max() < NEAR * wanted.abs().max())


@pytest.mark.parametrize("kind", PIECED)
@pytest.mark.usefixtures("each_gpus_sizes")
def test_chunked_recurrence_of_mixed_lengths_matches_reference(device: torch.device, kind: str) -> None:
    assert_mixed_lengths_match_reference(device, *KINDS[kind])


@pytest.mark.slow
@pytest.mark.usefixtures("sizes_of_other_gpus")
def test_chunked_recurrence_of_large_keys_matches_reference(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falcon H1's, which other GPUs than Hopper compute in chunks."""
    launched, advance = list[int](), triton_recurrence.advance_chunked
    monkeypatch.setattr(triton_recurrence, "advance_chunked", lambda *args: launched.append(1) or advance(*args))
    assert_mixed_lengths_match_reference(device, space(1, 1, 256, 32, norm=False), test_state_space.expected)
    assert launched


def assert_mixed_lengths_match_reference(
    device: torch.device, made: Made, expected: Callable[[Shape, Tensor], Tensor]
) -> None:
    """Whole prompts and chunks, with empty sequences among them, as mixed-batch graphs have."""
    generator = torch.Generator().manual_seed(4)
    shape, cuts = (
        made(generator),
        [
            (0, 0, 0, 0),
            (RECURRENCE_CHUNK + 7, 1, 0, RECURRENCE_CHUNK + 1),
            (RECURRENCE_CHUNK + 7, 3, 40, 2 * RECURRENCE_CHUNK + 5),
        ],
    )
    numbers = [given(shape, length, generator, torch.bfloat16) for length in cuts[-1]]
    states = []
    for backend, there in ((TritonBackend(), device), (ReferenceBackend(), torch.device("cpu"))):
        kept = Kept(backend, on(shape, there), torch.bfloat16, device=there)
        outputs = [Tensor()] * len(numbers)
        for before, after in pairwise(cuts):
            ends = enumerate(zip(before, after, strict=True))
            rows = [Row(numbers[at][:end], first, first, end, at) for at, (first, end) in ends]
            outputs = [torch.cat(pair) for pair in zip(outputs, kept.step(rows), strict=True)]
        for at, each in enumerate(outputs):
            assert error(each, expected(shape, numbers[at])) < TOLERANCE[torch.bfloat16]
        states.append(kept.states.matrices[: len(numbers)])
    assert states_are_close(*states)


@pytest.mark.usefixtures("each_gpus_sizes")
@pytest.mark.parametrize("decays", [False, True])
def test_chunked_delta_rule_is_stable_for_repeated_keys(device: torch.device, decays: bool) -> None:
    """A repeated token whose beta is nearly 1: powers of the triangular matrix would grow."""
    generator = torch.Generator().manual_seed(4)
    shape = KINDS["delta"][0](generator)
    assert isinstance(shape.rule, DeltaRule)
    numbers = given(shape, 2 * RECURRENCE_CHUNK, generator, torch.bfloat16)
    numbers[:] = numbers[:1]
    _, _, beside = parts(shape, numbers)
    b, a = beside.view(-1, 2, shape.heads).unbind(1)
    b[:], a[:] = 20.0, 2.0 if decays else -20.0
    states = []
    for backend in (TritonBackend(), ReferenceBackend()):
        there = device if isinstance(backend, TritonBackend) else torch.device("cpu")
        kept = Kept(backend, on(shape, there), torch.bfloat16, device=there)
        kept.step([Row(numbers, 0, 0, len(numbers), 2)])
        states.append(kept.states.matrices[2])
    assert states_are_close(*states)


def test_other_gpus_compute_token_by_token_until_trial_passes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_recurrence, "uses_hopper_sizes", lambda device: False)
    monkeypatch.setattr(chunked_recurrence, "needs_chunk_trial", lambda device: True)
    generator = torch.Generator().manual_seed(4)
    shape = KINDS["space"][0](generator)
    numbers = given(shape, RECURRENCE_CHUNK, generator, torch.bfloat16)
    outputs = []
    for fixed, passed in ((True, True), (False, False), (False, True)):
        backend = TritonBackend(deterministic=fixed)
        backend.passed_chunk_trial = passed
        kept = Kept(backend, on(shape, device), torch.bfloat16, device=device)
        kept.step([Row(numbers, 0, 0, len(numbers), 0)])
        outputs.append(kept.states.matrices[0])
    stepwise, untried, tried = outputs
    assert torch.equal(untried, stepwise)
    assert not torch.equal(tried, stepwise)


def test_sequences_with_drafts_use_stepwise_recurrence(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    shape = KINDS["delta"][0](generator)
    numbers = [given(shape, length, generator, torch.bfloat16) for length in (50, 45)]
    outputs = []
    for backend in (TritonBackend(), TritonBackend(deterministic=True)):
        kept = Kept(backend, on(shape, device), torch.bfloat16, 3, device)
        kept.step([Row(numbers[0][:10], 0, 0, 8, 0), Row(numbers[1][:5], 0, 0, 5, 1)])
        rows = [Row(numbers[0], 10, 8, 50, 0), Row(numbers[1], 5, 5, 43, 1)]
        outputs.append([*kept.step(rows), kept.states.matrices[:2]])
    for got, wanted in zip(*outputs, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_float32_and_float16_use_stepwise_recurrence(device: torch.device, dtype: torch.dtype) -> None:
    """Chunked products of these types would not be exact."""
    generator = torch.Generator().manual_seed(4)
    shape = KINDS["space"][0](generator)
    numbers = given(shape, MIN_CHUNKED_TOKENS + 1, generator, dtype)
    outputs = [prefill_output(TritonBackend(deterministic=fixed), shape, numbers, device) for fixed in (False, True)]
    assert torch.equal(*outputs)


def prefill_output(backend: TritonBackend, shape: Shape, numbers: Tensor, device: torch.device) -> Tensor:
    kept = Kept(backend, on(shape, device), numbers.dtype, device=device)
    return kept.step([Row(numbers, 0, 0, len(numbers), 0)])[0]


@pytest.mark.slow
def test_chunked_recurrence_handles_hundreds_of_sequences(device: torch.device) -> None:
    """More sequences than a program scans at once: a chunk finds its own after empty and short ones."""
    generator = torch.Generator().manual_seed(4)
    shape = space(1, 1, 12, 16)(generator)
    numbers = given(shape, 2 * RECURRENCE_CHUNK, generator, torch.bfloat16)
    counts = [1, 0, 2] * 90 + [RECURRENCE_CHUNK + 9, 1, 40]
    kept = Kept(TritonBackend(), on(shape, device), torch.bfloat16, device=device)
    kept.states = replace(
        kept.states,
        matrices=kept.states.matrices[:1].repeat(len(counts), 1, 1, 1),
        draft_inputs=kept.states.draft_inputs[:1].repeat(len(counts), 1, 1),
    )
    outputs = kept.step([Row(numbers[:count], 0, 0, count, at) for at, count in enumerate(counts)])
    for got, count in zip(outputs[-3:], counts[-3:], strict=True):
        assert error(got, test_state_space.expected(shape, numbers[:count])) < TOLERANCE[torch.bfloat16]


class ThreeDecodesBackend(TritonBackend):
    """Declares the first three sequences of a step decodes."""

    def run_recurrence(self, *given: Any) -> Tensor:
        *others, step = given
        return super().run_recurrence(
            *others, replace(step, decode_prefill_parts=(replace(step, context_lens=step.context_lens[:3]), step))
        )


def test_chunked_recurrence_after_decodes_gives_same_bits(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    shape = space(1, 1, 12, 16)(generator)
    numbers = [given(shape, length, generator, torch.bfloat16) for length in (1, 1, 1, RECURRENCE_CHUNK + 9, 40)]
    outputs = []
    for backend in (TritonBackend(), ThreeDecodesBackend()):
        kept = Kept(backend, on(shape, device), torch.bfloat16, device=device)
        outputs.append(kept.step([Row(each, 0, 0, len(each), at) for at, each in enumerate(numbers)]))
    for got, wanted in zip(*outputs, strict=True):
        assert torch.equal(got, wanted)
