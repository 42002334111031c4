"""Compiled paged attention against the float64 reference."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import Part, attend, error, page, random_part

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}
MIX = ((1, 1), (5, 5), (17, 1), (16, 16), (300, 1), (300, 44), (513, 2), (40, 33))  # (context, queries)


@cache
def case(
    mix: tuple[tuple[int, int], ...],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    chunked: bool = False,
) -> tuple[list[Part], list[Tensor]]:
    """A batch and its float64 reference result, computed once for all instruction sets."""
    generator = torch.Generator().manual_seed(20)
    parts = [random_part(c, q, heads, kv_heads, dim, dtype, generator) for c, q in mix]
    wide = [part.to(torch.float64) for part in parts]
    return parts, attend(ReferenceBackend(), wide, window=window, softcap=softcap, scale=scale, chunked=chunked)


def check(
    cpu: CpuBackend,
    mix: tuple[tuple[int, int], ...],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    *,
    tolerance: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    chunked: bool = False,
) -> None:
    parts, expected = case(mix, heads, kv_heads, dim, dtype, window, softcap, scale, chunked)
    got = attend(cpu, parts, window=window, softcap=softcap, scale=scale, chunked=chunked)
    for row, (mine, judge) in enumerate(zip(got, expected, strict=True)):
        assert error(mine, judge) < (tolerance or TOLERANCE[dtype]), f"sequence {row}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [2, 8, 64, 80, 96, 128, 256])
def test_attention_of_head_dims_matches_reference(cpu: CpuBackend, dim: int, dtype: torch.dtype) -> None:
    check(cpu, MIX, 4, 2, dim, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (8, 1), (3, 3), (20, 4), (71, 1)])
def test_grouped_query_attention_matches_reference(
    cpu: CpuBackend, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    check(cpu, MIX[:6], heads, kv_heads, 32, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 16, 37, 260, 4096])
def test_windowed_softcapped_attention_matches_reference(
    cpu: CpuBackend, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    check(cpu, (*MIX, (1030, 3)), 6, 2, 16, dtype, window=window, softcap=softcap)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 16, 37, 260])
def test_chunked_attention_matches_reference(cpu: CpuBackend, size: int, dtype: torch.dtype) -> None:
    check(cpu, (*MIX, (1030, 3), (530, 300)), 6, 2, 16, dtype, window=size, chunked=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_context_attention_matches_reference(cpu: CpuBackend, dtype: torch.dtype) -> None:
    check(cpu, ((2500, 1),), 2, 1, 64, dtype)
    check(cpu, ((1100, 700), (1030, 1)), 2, 1, 64, dtype)


WHOLE = ((1, 1), (17, 17), (40, 40), (256, 256), (300, 300), (530, 530))


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("ahead", "window"), [(None, None), (16, 17), (270, 30), (1, None)])
def test_lookahead_attention_matches_reference_and_ignores_batch(
    cpu: CpuBackend, ahead: int | None, window: int | None, biased: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    parts = [random_part(c, q, 6, 3, 32, dtype, generator) for c, q in WHOLE]
    bias = torch.randn((6, 2 * 530 + 15), generator=generator) if biased else None
    wide = [part.to(torch.float64) for part in parts]
    expected = attend(ReferenceBackend(), wide, window=window, ahead=ahead, bias=bias)
    got = attend(cpu, parts, window=window, ahead=ahead, bias=bias)
    alone = [attend(cpu, [part], window=window, ahead=ahead, bias=bias, seed=4)[0] for part in parts]
    for row, (mine, judge) in enumerate(zip(got, expected, strict=True)):
        assert error(mine, judge) < TOLERANCE[dtype], f"sequence {row}"
        assert torch.equal(mine, alone[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20, 300])
def test_attention_sinks_match_extra_softmax_column(
    cpu: CpuBackend, window: int | None, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """The expected result is a softmax with one more column, which is then dropped."""
    parts = [random_part(c, q, 6, 2, 32, dtype, generator) for c, q in (*MIX, (1030, 3))]
    sinks = torch.tensor([-200.0, -1.0, 0.0, 1.0, 4.0, 200.0])
    got = attend(cpu, parts, window=window, sinks=sinks)
    judged = attend(ReferenceBackend(), [part.to(torch.float64) for part in parts], window=window, sinks=sinks)
    for part, mine, judge in zip(parts, got, judged, strict=True):
        q, k, v = (each.double() for each in (part.q, part.k, part.v))
        behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = (behind < 0) | (behind >= (window or len(k)))
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(3, 1)) * 32**-0.5
        scores = scores.masked_fill(hidden, -torch.inf)
        column = sinks.double()[:, None, None].expand(-1, len(q), 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
        wanted = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(3, 1))
        assert error(mine, wanted) < TOLERANCE[dtype]
        assert error(judge, wanted) < 1e-12
        assert torch.equal(attend(cpu, [part], window=window, sinks=sinks, seed=4)[0], mine)


def test_attention_with_large_scores_stays_finite(cpu: CpuBackend) -> None:
    """Scores are in the hundreds, where float32 itself is exact to about 1e-5."""
    check(cpu, MIX, 2, 1, 64, torch.float32, tolerance=2e-4, scale=20.0)


def test_attention_with_very_negative_equal_scores_averages_values(cpu: CpuBackend) -> None:
    """The exponentials are relative to a tile's peak, not to 0."""
    q, k = torch.full((1, 1, 16), 30.0), torch.full((300, 1, 16), -30.0)
    v = torch.arange(300.0)[:, None, None].expand(300, 1, 16).contiguous()
    assert torch.allclose(attend(cpu, [Part(q, k, v)])[0], torch.tensor(149.5))


def test_block_table_outside_cache_raises_index_error(cpu: CpuBackend, generator: torch.Generator) -> None:
    part = random_part(40, 1, 2, 1, 16, torch.float32, generator)
    k_cache, v_cache, metadata = page(cpu, [part])
    metadata.block_table[0, 1] = k_cache.shape[0]
    with pytest.raises(IndexError, match="block table"):
        cpu.paged_attention(part.q, k_cache, v_cache, metadata, AttentionParams(1.0))


def test_float16_raises_type_error(cpu: CpuBackend, generator: torch.Generator) -> None:
    with pytest.raises(TypeError, match="float32, bfloat16 or 8 bits"):
        cpu.kv_cache_shape(4, 1, 16, torch.float16)
    part = random_part(4, 1, 2, 1, 16, torch.float32, generator)
    k_cache, v_cache, metadata = page(cpu, [part])
    with pytest.raises(TypeError, match="cannot serve"):
        cpu.paged_attention(part.q.half(), k_cache, v_cache, metadata, AttentionParams(1.0))


def test_strided_kv_cache_gives_same_bits_as_contiguous(cpu: CpuBackend, generator: torch.Generator) -> None:
    """A layer's cache may be a slice of one tensor for all layers, pages outermost."""
    part = random_part(70, 5, 4, 2, 32, torch.bfloat16, generator)
    k_cache, v_cache, metadata = page(cpu, [part])
    k_layers, v_layers = (torch.stack([c, torch.zeros_like(c)], dim=1) for c in (k_cache, v_cache))
    straight = cpu.paged_attention(part.q, k_cache, v_cache, metadata, AttentionParams(0.2))
    strided = cpu.paged_attention(part.q, k_layers[:, 0], v_layers[:, 0], metadata, AttentionParams(0.2))
    assert torch.equal(straight, strided)
