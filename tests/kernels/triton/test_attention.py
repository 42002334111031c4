"""Triton's paged attention against the float64 reference, and the bitwise contract of fixed splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu import triton_backend, triton_launch_sizes
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import Part, attend, attended_on, error, page, random_part, to_device
from tests.kernels.triton.conftest import INTERPRETED

reference = ReferenceBackend()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}
DTYPES = list(TOLERANCE)
DECODE = [(1, 1), (17, 1), (330, 1), (64, 1)]  # (context, queries)
MIXED = [(270, 1), (5, 5), (16, 16), (60, 33), (33, 2)]


class Paged(ReferenceBackend):
    """The backend with a given block size, on CPU tensors. The reference stores keys and values, in the same layout:
    the Triton kernel takes seconds under the interpreter.
    """

    def __init__(self, size: int, device: torch.device, *, fixed: bool = False) -> None:
        super().__init__()
        self.block_size = size
        self._device = device
        self._triton = triton_backend.TritonBackend(deterministic=fixed)

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        return attended_on(self._device, self._triton.paged_attention, (q, k_cache, v_cache), metadata, softmax)


def check(
    backend: Paged,
    mix: list[tuple[int, int]],
    dtype: torch.dtype,
    *,
    heads: int = 3,
    kv_heads: int = 1,
    dim: int = 64,
    tolerance: float | None = None,
    **rules: Any,
) -> None:
    generator = torch.Generator().manual_seed(20)
    parts = [random_part(c, q, heads, kv_heads, dim, dtype, generator) for c, q in mix]
    expected = attend(reference, [part.to(torch.float64) for part in parts], **rules)
    for row, (mine, judge) in enumerate(zip(attend(backend, parts, **rules), expected, strict=True)):
        assert error(mine, judge) < (tolerance or TOLERANCE[dtype]), f"sequence {row}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 256])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_attention_of_head_dims_and_block_sizes_matches_reference(
    device: torch.device, dim: int, size: int, dtype: torch.dtype
) -> None:
    for mix in (DECODE, MIXED):
        check(Paged(size, device), mix, dtype, dim=dim)


@pytest.mark.parametrize("mix", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(("window", "softcap"), [(1, None), (16, None), (100, 5.0), (4096, None), (None, 5.0)])
@pytest.mark.parametrize("fixed", [False, True])
def test_windowed_softcapped_attention_matches_reference(
    device: torch.device, mix: list[tuple[int, int]], window: int | None, softcap: float | None, fixed: bool
) -> None:
    check(Paged(16, device, fixed=fixed), mix, torch.bfloat16, window=window, softcap=softcap)
    check(Paged(256, device, fixed=fixed), mix[::2], torch.float32, window=window, softcap=softcap)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("size", [16, 100])
def test_chunked_attention_matches_reference(device: torch.device, size: int, fixed: bool) -> None:
    for mix in (DECODE, MIXED):
        check(Paged(16, device, fixed=fixed), mix, torch.bfloat16, window=size, chunked=True)
    check(Paged(16, device, fixed=fixed), [(1100, 1), (3, 1)], torch.float32, window=600, chunked=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (8, 1), (3, 3), (20, 4), (71, 1)])
def test_grouped_query_attention_matches_reference(device: torch.device, heads: int, kv_heads: int) -> None:
    check(Paged(16, device), DECODE[:3], torch.bfloat16, heads=heads, kv_heads=kv_heads)
    check(Paged(16, device), MIXED[:3], torch.bfloat16, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_attention_with_sinks_matches_reference(device: torch.device, window: int | None, fixed: bool) -> None:
    """Sinks below, among and far above the scores; splits merged or reduced."""
    sinks = torch.tensor([-3.0, 0.5, 90.0])
    for mix in (DECODE, MIXED):
        check(Paged(16, device, fixed=fixed), mix, torch.bfloat16, window=window, sinks=sinks)
    check(Paged(16, device, fixed=fixed), [(1100, 1), (3, 1)], torch.float32, sinks=sinks)


def test_split_long_context_attention_matches_reference(device: torch.device) -> None:
    for fixed in (False, True):
        backend = Paged(16, device, fixed=fixed)
        check(backend, [(1100, 1), (3, 1)], torch.bfloat16, heads=2, kv_heads=1)
        check(backend, [(600, 3)], torch.bfloat16, heads=2, kv_heads=1)
        check(backend, [(1030, 1), (40, 1)], torch.bfloat16, heads=2, kv_heads=1, window=600)


def test_attention_with_large_scores_stays_finite(device: torch.device) -> None:
    """Scores are in the hundreds, where float32 itself is exact to about 1e-5."""
    check(Paged(16, device), MIXED, torch.float32, tolerance=2e-4, scale=20.0)


def test_attention_with_very_negative_equal_scores_averages_values(device: torch.device) -> None:
    """The exponentials are relative to a tile's peak, not to 0."""
    q, k = torch.full((1, 1, 16), 30.0), torch.full((300, 1, 16), -30.0)
    v = torch.arange(300.0)[:, None, None].expand(300, 1, 16).contiguous()
    assert torch.allclose(attend(Paged(16, device), [Part(q, k, v)])[0], torch.tensor(149.5))


def test_strided_kv_cache_gives_same_bits_as_contiguous(device: torch.device, generator: torch.Generator) -> None:
    """A layer's cache may be a slice of one tensor for all layers, pages outermost."""
    backend = Paged(16, device)
    part = random_part(70, 5, 4, 2, 32, torch.bfloat16, generator)
    k_cache, v_cache, metadata = (x.to(device) if isinstance(x, Tensor) else x for x in page(backend, [part]))
    k_layers, v_layers = (torch.stack([c, torch.zeros_like(c)], dim=1) for c in (k_cache, v_cache))
    q, there = part.q.to(device), to_device(metadata, device)
    run, softmax = triton_backend.TritonBackend().paged_attention, AttentionParams(0.2)
    straight = run(q, k_cache, v_cache, there, softmax)
    assert torch.equal(straight, run(q, k_layers[:, 0], v_layers[:, 0], there, softmax))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "softcap", "dim"), [(None, None, 32), (510, 9.0, 32), (None, None, 256)])
def test_fixed_split_attention_bits_do_not_depend_on_batch(
    device: torch.device,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    dim: int,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row has the same bits decoded alone, in any chunk, or in one prompt, with partial results stored or merged."""
    backend = Paged(16, device, fixed=True)
    part = random_part(520, 18, 2, 1, dim, dtype, generator)
    whole = attend(backend, [part], window=window, softcap=softcap)[0]
    other = random_part(20, 1, 2, 1, dim, dtype, generator)
    for begin, end, beside in ((0, 1, 0), (0, 11, 0), (11, 13, 2), (9, 10, 0), (17, 18, 33)):
        parts = [*[other] * beside, part.rows(begin, end)]
        chunk = attend(backend, parts, seed=end, window=window, softcap=softcap)[-1]
        assert torch.equal(chunk, whole[begin:end]), (begin, end, beside)
    monkeypatch.setattr(triton_launch_sizes, "num_multiprocessors", lambda device: 0)
    assert torch.equal(attend(backend, [other, part], window=window, softcap=softcap)[1], whole)


@settings(max_examples=4, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 530), st.integers(1, 20)), min_size=1, max_size=3),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from(DTYPES),
    dim=st.sampled_from([16, 64, 80]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (14, 2)]),
    size=st.sampled_from([16, 32, 256]),
    window=st.none() | st.integers(1, 600),
)
def test_attention_of_random_batches_matches_reference(
    lengths: list[tuple[int, int]],
    seed: int,
    dtype: torch.dtype,
    dim: int,
    heads: tuple[int, int],
    size: int,
    window: int | None,
) -> None:
    """Even and fixed splits match the reference; fixed splits equal each sequence alone bit for bit."""
    generator, device = torch.Generator().manual_seed(seed), torch.device("cpu" if INTERPRETED else "cuda")
    parts = [random_part(context, min(context, queries), *heads, dim, dtype, generator) for context, queries in lengths]
    expected = attend(reference, [part.to(torch.float64) for part in parts], window=window)
    for fixed in (False, True):
        backend = Paged(size, device, fixed=fixed)
        together = attend(backend, parts, window=window, seed=seed)
        for mine, judge in zip(together, expected, strict=True):
            assert error(mine, judge) < TOLERANCE[dtype]
    last = attend(backend, [parts[-1].rows(len(parts[-1].q) - 1, len(parts[-1].q))], window=window)[0]
    assert torch.equal(last[0], together[-1][-1])


def test_full_gpu_splits_only_long_contexts() -> None:
    assert triton_launch_sizes.num_even_splits(1, 8000, one_token=True) == 1
    assert triton_launch_sizes.num_even_splits(1, 60000, one_token=True) == 8
    assert triton_launch_sizes.num_even_splits(1, 60000, one_token=False) == 1
    assert triton_launch_sizes.num_even_splits(33, 300, one_token=True) == 2
    assert triton_launch_sizes.num_even_splits(33, 60000, one_token=True) == 32
