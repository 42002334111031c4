"""Sampling of the compiled kernels against the reference, which other tests compare with transformers' filters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import reference
from quire.kernels.cpu.backend import CpuBackend
from tests.tiers import examples

ROW = st.tuples(
    st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 40, 3000]),
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    st.sampled_from([0.001, 0.3, 0.7, 0.999]),  # not close to 0 or 1: the kernels sum masses in fixed point
)


def sample_with_cpu_and_reference(
    cpu: CpuBackend, logits: torch.Tensor, rows: list[tuple[float, ...]]
) -> tuple[list[int], list[int]]:
    vocab = logits.shape[1]
    filters = torch.tensor(
        [(t, k if 0 < k < vocab else vocab, top_p, min_p) for t, k, top_p, min_p, _ in rows], dtype=torch.float64
    )
    u = torch.tensor([row[-1] for row in rows], dtype=torch.float64)
    return cpu.sample_tokens(logits, filters, u).tolist(), reference.sample_tokens(logits.clone(), filters, u).tolist()


@pytest.mark.few(14)
@pytest.mark.parametrize("vocab", [1, 5, 16, 511, 513, 6000, 50_000])
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0, 30.0])
def test_sampled_tokens_equal_reference(cpu: CpuBackend, vocab: int, scale: float, generator: torch.Generator) -> None:
    kinds = [(1.0, 0, 1.0, 0.0), (0.8, 0, 0.95, 0.0), (0.8, 40, 1.0, 0.0), (1.2, 100, 0.9, 0.05), (1.0, 0, 1.0, 0.2)]
    logits = torch.randn((30, vocab), generator=generator) * scale
    u = torch.rand(30, generator=generator, dtype=torch.float64).tolist()
    got, expected = sample_with_cpu_and_reference(cpu, logits, [(*kinds[i % len(kinds)], u[i]) for i in range(30)])
    assert got == expected


def test_sampled_tokens_equal_reference_for_random_parameters(cpu: CpuBackend) -> None:
    @settings(max_examples=examples(60), deadline=None)
    @given(st.integers(1, 5000), st.sampled_from([0.1, 3.0, 30.0]), st.lists(ROW, min_size=1, max_size=4))
    def check(vocab: int, scale: float, rows: list[tuple[float, ...]]) -> None:
        logits = torch.randn((len(rows), vocab), generator=torch.Generator().manual_seed(vocab)) * scale
        got, expected = sample_with_cpu_and_reference(cpu, logits, rows)
        assert got == expected

    check()


def test_sampling_keeps_or_drops_equal_logits_together(cpu: CpuBackend) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -torch.inf, 0.0]])
    for top_k, top_p, expected in [
        (1, 1.0, {1, 3}),
        (3, 1.0, {1, 2, 3, 4, 5}),
        (8, 0.6, {1, 3}),
        (4, 0.9, {1, 2, 3, 4, 5}),
    ]:
        filters = torch.tensor([[1.0, top_k, top_p, 0.0]], dtype=torch.float64)
        tokens = {
            int(cpu.sample_tokens(logits, filters, torch.tensor([i / 200], dtype=torch.float64))) for i in range(200)
        }
        assert tokens == expected


@pytest.mark.usefixtures("keep_threads")
def test_sampled_token_does_not_depend_on_batch(cpu: CpuBackend, generator: torch.Generator) -> None:
    logits = torch.randn((40, 3000), generator=generator)
    filters = torch.tensor([[0.8, 50, 0.9, 0.0]], dtype=torch.float64).repeat(40, 1)
    u = torch.rand(40, generator=generator, dtype=torch.float64)
    alone = [int(cpu.sample_tokens(logits[i : i + 1], filters[i : i + 1], u[i : i + 1])) for i in range(40)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert cpu.sample_tokens(logits, filters, u).tolist() == alone


def test_sampling_returns_valid_token_when_all_logits_are_minus_infinity(cpu: CpuBackend) -> None:
    filters = torch.tensor([[1.0, 5, 0.5, 0.1]], dtype=torch.float64)
    assert (
        0
        <= int(cpu.sample_tokens(torch.full((1, 9), -torch.inf), filters, torch.tensor([0.5], dtype=torch.float64)))
        < 9
    )
