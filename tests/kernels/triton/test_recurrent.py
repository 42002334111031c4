"""Delta nets, state spaces and selective scans in Triton: against the float64 references of the CPU tests. Their bits
must not depend on how sequences are cut, with wrong and right drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.triton_backend import TritonBackend
from tests.kernels import test_delta_rule, test_selective_scan, test_state_space
from tests.kernels.ragged import error
from tests.kernels.recurrences import Kept, Row, Shape, cut_at_random, given, on
from tests.kernels.test_short_conv import TOLERANCE as OF_CONVOLUTIONS
from tests.kernels.test_short_conv import Kept as KeptColumns
from tests.kernels.test_short_conv import expected as convolved
from tests.kernels.test_short_conv import made as convolution
from tests.kernels.test_short_conv import on as moved

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
Made = Callable[[torch.Generator], Shape]


def delta(*sizes: int, kimi: bool = False) -> Made:
    return lambda generator: test_delta_rule.made(*sizes, generator, kimi=kimi)


def space(*sizes: int, **rules: Any) -> Made:
    return lambda generator: test_state_space.made(*sizes, generator, **rules)


def scan(*sizes: int, **rules: Any) -> Made:
    return lambda generator: test_selective_scan.made(*sizes, generator, **rules)


KINDS: dict[str, tuple[Made, Callable[[Shape, Tensor], Tensor]]] = {
    "delta": (delta(2, 4, 12, 20), test_delta_rule.expected),
    "delta of Qwen3.5": (delta(1, 2, 128, 128), test_delta_rule.expected),
    "delta of Kimi": (delta(1, 1, 128, 128, kimi=True), test_delta_rule.expected),
    "space": (space(2, 4, 12, 32), test_state_space.expected),
    "space of Granite, without a norm": (
        space(1, 2, 128, 64, norm=False, dt_limits=(0.3, 1.1)),
        test_state_space.expected,
    ),
    "space, normed first": (space(3, 3, 6, 80, norm_before_gate=True), test_state_space.expected),
    "scan": (scan(2, 12, 80), test_selective_scan.expected),
    "scan with norms": (scan(1, 16, 64, norm=True), test_selective_scan.expected),
    "scan with large steps": (scan(1, 10, 32, far=12.0), test_selective_scan.expected),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_recurrence_prefill_matches_float64(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    generator, (made, expected) = torch.Generator().manual_seed(4), KINDS[kind]
    shape = made(generator)
    prompts = [given(shape, length, generator, dtype) for length in (1, 2, 23)]
    kept = Kept(TritonBackend(), on(shape, device), dtype, device=device)
    rows = [Row(each, 0, 0, len(each), at) for at, each in enumerate(prompts)]
    for got, prompt in zip(kept.step(rows), prompts, strict=True):
        assert error(got, expected(shape, prompt)) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("made", "dtype"),
    [
        (delta(1, 2, 12, 20), torch.bfloat16),
        (delta(1, 1, 12, 20, kimi=True), torch.bfloat16),
        (space(1, 1, 12, 40), torch.float32),
        (scan(1, 12, 48, norm=True), torch.bfloat16),
    ],
    ids=["delta", "delta of Kimi", "space", "scan"],
)
def test_recurrence_bits_do_not_depend_on_chunking(device: torch.device, made: Made, dtype: torch.dtype) -> None:
    shape = on(made(torch.Generator().manual_seed(2)), device)
    # The interpreter, which is slow, takes shorter sequences: some with three drafts, some with none.
    seeds, most = (range(3), 50) if device.type == "cuda" else ((0, 2), 30)
    for seed in seeds:
        cut_at_random(TritonBackend(deterministic=True), shape, dtype, seed, device, most=most)


def test_recurrence_leaves_unused_slots_unchanged(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    shape = delta(1, 1, 12, 20)(generator)
    kept = Kept(TritonBackend(), on(shape, device), torch.float32, 2, device)
    kept.step([Row(given(shape, 5, generator, torch.float32), 0, 0, 4, 3)])
    assert kept.states.matrices[3].isfinite().all()
    assert kept.states.matrices[[0, 1, 2, 4]].isnan().all()
    written = kept.states.draft_inputs.isfinite().all(-1)
    assert written.tolist() == [[slot == 3 and place == 0 for place in range(2)] for slot in range(5)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ungated_short_conv_without_blocks_matches_float64(device: torch.device, dtype: torch.dtype) -> None:
    """Computed in chunks, with wrong drafts."""
    generator = torch.Generator().manual_seed(5)
    conv = convolution(70, 4, bias=True, generator=generator, gated=False)
    prompt = torch.randn((45, 70), generator=generator).to(dtype)
    there = moved(conv, device)
    (whole,) = KeptColumns(TritonBackend(), there, dtype, device, paged=False).step([(prompt, 0, [0], 1)])
    assert error(whole, convolved(prompt, conv)) < OF_CONVOLUTIONS[dtype]
    for drafts in (0, 3):
        kept, done, found = KeptColumns(TritonBackend(), there, dtype, device, drafts, paged=False), 0, whole[:0]
        for count in (1, 1, 2, 3, 20, 1, 14, 3):
            wrong = torch.randn((drafts, 70), generator=generator).to(dtype)
            (got,) = kept.step([(torch.cat([prompt[: done + count], wrong]), done, [0], 2)])
            found, done = torch.cat([found, got[:count]]), done + count
        assert torch.equal(found, whole)


def test_recurrence_accepts_step_without_tokens(device: torch.device) -> None:
    shape = on(delta(1, 1, 12, 20)(torch.Generator().manual_seed(2)), device)
    kept, nothing = (
        Kept(TritonBackend(), shape, torch.float32, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
    )
    where = AttentionMetadata(*[nothing] * 6, 0, 0, state_slots=nothing)
    empty = [torch.zeros((0, size), device=device) for size in (shape.rule.input_dim, 20, shape.rule.head_inputs_dim)]
    assert TritonBackend().run_recurrence(*empty, shape.rule, kept.states, where).shape == (0, 20)
