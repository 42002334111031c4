"""The bitwise contract of CPU kernels: a row's bits depend only on its own query, keys and positions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.cpu.backend import CpuBackend
from tests.kernels.ragged import assert_chunks_equal_whole, attend, random_part
from tests.tiers import examples

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap", "sunk"), [(None, None, False), (100, None, True), (20, 9.0, False)])
def test_attention_bits_do_not_depend_on_chunking(
    cpu: CpuBackend,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    sunk: bool,
    generator: torch.Generator,
) -> None:
    part = random_part(530, 530, 6, 2, 64, dtype, generator)
    sinks = torch.linspace(-2, 2, 6) if sunk else None
    whole = attend(cpu, [part], window=window, softcap=softcap, sinks=sinks)[0]
    for sizes in ([1, 15, 16, 17, 251, 230], [100, 430], [529, 1], [256, 256, 18]):
        begin = 0
        for size in sizes:
            chunk = attend(cpu, [part.rows(begin, begin + size)], window=window, softcap=softcap, sinks=sinks)[0]
            assert torch.equal(chunk, whole[begin : begin + size]), (sizes, begin)
            begin += size
    for i in range(0, 530, 11):
        row = attend(cpu, [part.rows(i, i + 1)], window=window, softcap=softcap, sinks=sinks)[0][0]
        assert torch.equal(row, whole[i]), i


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_bits_do_not_depend_on_batch_or_block_placement(
    cpu: CpuBackend, dtype: torch.dtype, generator: torch.Generator
) -> None:
    mix = [(1, 1), (700, 1), (33, 33), (512, 1), (300, 200), (2000, 1), (16, 1)]
    parts = [random_part(c, q, 9, 3, 64, dtype, generator) for c, q in mix]
    together = attend(cpu, parts)
    for seed, part, out in zip(range(len(parts)), parts, together, strict=True):
        assert torch.equal(attend(cpu, [part], seed=seed + 1)[0], out)
    for first, second in zip(attend(cpu, parts[::-1], seed=9), together[::-1], strict=True):
        assert torch.equal(first, second)


@pytest.mark.few(1)
@pytest.mark.usefixtures("keep_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_bits_do_not_depend_on_thread_count(
    cpu: CpuBackend, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Many short pieces, and a few long ones whose tiles are spread over the threads."""
    batches = [[(2300, 1)], [(1000, 300)], [(400, 1)] * 20, [(1500, 4), (90, 90)]]
    for mix, sinks in itertools.product(batches, (None, torch.linspace(-2, 2, 6))):
        parts = [random_part(c, q, 6, 2, 64, dtype, generator) for c, q in mix]
        torch.set_num_threads(1)
        alone = attend(cpu, parts, sinks=sinks)
        for threads in (2, 3, 5):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, attend(cpu, parts, sinks=sinks), alone)), (mix, threads)


@settings(max_examples=examples(25), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=4),
    chunks=st.lists(st.lists(st.sampled_from([0, 1, 7, 64, 600]), min_size=4, max_size=4), max_size=6),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from(DTYPES),
    dim=st.sampled_from([8, 16, 40, 64, 80]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (8, 8), (14, 2)]),
    window=st.none() | st.integers(1, 400),
    softcap=st.sampled_from([None, 10.0]),
    chunked=st.booleans(),
)
def test_attention_bits_are_equal_in_random_chunked_batches(
    lengths: list[int],
    chunks: list[list[int]],
    seed: int,
    dtype: torch.dtype,
    dim: int,
    heads: tuple[int, int],
    window: int | None,
    softcap: float | None,
    chunked: bool,
) -> None:
    """Chunks of several sequences, mixed into steps at random, must equal each sequence computed alone and whole."""
    cpu = CpuBackend()
    if cpu.missing_reason:
        pytest.skip(cpu.missing_reason)
    generator = torch.Generator().manual_seed(seed)
    parts = [random_part(n, n, *heads, dim, dtype, generator) for n in lengths]
    assert_chunks_equal_whole(cpu, parts, chunks, seed, window=window, softcap=softcap, chunked=chunked)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_gate_bits_do_not_depend_on_batch(
    cpu: CpuBackend, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, weight = torch.randn((300, 576), generator=generator).to(dtype), torch.ones(576)
    normed, gated, bent = cpu.rms_norm(x, weight, 1e-5), cpu.silu_mul(x), cpu.gelu_mul(x)
    added, total = cpu.add_rms_norm(x.clone(), x.flip(0), weight, 1e-5)
    for i in (0, 17, 299):
        row = slice(i, i + 1)
        assert torch.equal(cpu.rms_norm(x[row], weight, 1e-5), normed[row])
        assert torch.equal(cpu.silu_mul(x[row]), gated[row])
        assert torch.equal(cpu.gelu_mul(x[row]), bent[row])
        alone = cpu.add_rms_norm(x[row].clone(), x.flip(0)[row].clone(), weight, 1e-5)
        assert torch.equal(alone[0], added[row])
        assert torch.equal(alone[1], total[row])
