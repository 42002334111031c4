"""8-bit KV caches: rounding, compiled attention against float64 on the rounded values, and the bitwise contract."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.kv_quantization import (
    QUANTIZED_KV_DTYPES,
    UNIT_KV_SCALES,
    KVScales,
    dequantize_kv,
    num_scale_elements,
    quantize_kv,
)
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import Part, assert_chunks_equal_whole, attend, empty_cache, error, page, random_part
from tests.tiers import examples

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}
MIX = [(1, 1), (5, 5), (17, 1), (16, 16), (300, 1), (300, 44), (513, 2), (40, 33)]  # (context, queries)
codes = pytest.mark.parametrize("kv_dtype", QUANTIZED_KV_DTYPES, ids=str)


def on_codes(part: Part, kv_dtype: torch.dtype, scales: KVScales = UNIT_KV_SCALES) -> Part:
    """The part in float64, with keys and values rounded to codes and back."""

    def read(x: Tensor, scale: float) -> Tensor:
        return dequantize_kv(*quantize_kv(x, kv_dtype, scale), scale, torch.float64)

    return Part(part.q.double(), read(part.k, scales.key), read(part.v, scales.value))


def check(
    cpu: CpuBackend,
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    scales: KVScales = UNIT_KV_SCALES,
    mix: list[tuple[int, int]] = MIX,
    **rules: float | int | None,
) -> None:
    generator = torch.Generator().manual_seed(20)
    parts = [random_part(c, q, heads, kv_heads, dim, dtype, generator) for c, q in mix]
    expected = attend(ReferenceBackend(), [on_codes(part, kv_dtype, scales) for part in parts], **rules)  # type: ignore[arg-type]
    got = attend(cpu, parts, kv_dtype=kv_dtype, scales=scales, **rules)  # type: ignore[arg-type]
    for row, (mine, judge) in enumerate(zip(got, expected, strict=True)):
        assert error(mine, judge) < TOLERANCE[dtype], f"sequence {row}"


@codes
def test_quantized_kv_rounding_error_is_bounded(kv_dtype: torch.dtype, generator: torch.Generator) -> None:
    """The bound is half a step for integers and 1/16 for 8-bit floats, which saturate at their largest number."""
    x = torch.randn((50, 3, 64), generator=generator) * torch.logspace(-3, 3, 50)[:, None, None]
    got = dequantize_kv(*quantize_kv(x, kv_dtype, 1.0), 1.0, torch.float64)
    if kv_dtype == torch.int8:
        assert ((got - x).abs() <= x.abs().amax(-1, keepdim=True) / 127 * 0.505).all()
    else:
        inside = x.abs() <= 448
        assert ((got - x).abs() <= x.abs() / 16 + 2**-10)[inside].all()
        assert (got.abs() == 448)[~inside].all()
        assert (~inside).any()


@pytest.mark.few(14)
@codes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 8, 40, 64, 80, 128, 256])
def test_quantized_kv_attention_of_head_dims_matches_reference(
    cpu: CpuBackend, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    check(cpu, kv_dtype, dtype, dim=dim)


@pytest.mark.few(10)
@codes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (8, 1), (3, 3), (71, 1)])
def test_quantized_kv_grouped_query_attention_matches_reference(
    cpu: CpuBackend, heads: int, kv_heads: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    check(cpu, kv_dtype, dtype, heads=heads, kv_heads=kv_heads, dim=32, mix=MIX[:6])


@pytest.mark.few(16)
@codes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 37, 260])
def test_quantized_kv_windowed_softcapped_attention_matches_reference(
    cpu: CpuBackend, window: int | None, softcap: float | None, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    check(cpu, kv_dtype, dtype, dim=16, mix=[*MIX, (1030, 3)], window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", DTYPES)
def test_calibrated_float8_kv_scales_match_reference(cpu: CpuBackend, dtype: torch.dtype) -> None:
    """8-bit floats: the key's scale multiplies the scores before the softcap, the value's scale the result."""
    check(cpu, torch.float8_e4m3fn, dtype, scales=KVScales(0.03, 0.7), softcap=5.0)


@codes
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_kv_biased_lookahead_attention_matches_reference(
    cpu: CpuBackend, dtype: torch.dtype, kv_dtype: torch.dtype, generator: torch.Generator
) -> None:
    parts = [random_part(n, n, 6, 3, 32, dtype, generator) for n in (1, 17, 256, 300)]
    bias = torch.randn((6, 2 * 300 + 15), generator=generator)
    expected = attend(ReferenceBackend(), [on_codes(part, kv_dtype) for part in parts], ahead=16, bias=bias)
    for mine, judge in zip(attend(cpu, parts, ahead=16, bias=bias, kv_dtype=kv_dtype), expected, strict=True):
        assert error(mine, judge) < TOLERANCE[dtype]


@codes
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [UNIT_KV_SCALES, KVScales(0.01, 3.0)], ids=["unscaled", "scaled"])
def test_stored_kv_codes_equal_reference_bit_for_bit(
    cpu: CpuBackend, dtype: torch.dtype, kv_dtype: torch.dtype, scales: KVScales, generator: torch.Generator
) -> None:
    """Compares store_kv and rope_and_store_kv, including heads of zeros, tiny and huge numbers."""
    tokens, kv_heads, dim = 40, 3, 24
    sizes = torch.tensor([0.0, 1e-30, 1e-3, 1.0, 50.0, 1e4]).repeat(20)[: tokens * kv_heads].view(tokens, kv_heads, 1)
    k, v = ((torch.randn((tokens, kv_heads, dim), generator=generator) * sizes).to(dtype) for _ in range(2))
    qkv = torch.cat([torch.zeros(tokens, 6 * dim, dtype=dtype), k.flatten(1), v.flatten(1)], dim=1)
    part = Part(torch.zeros(tokens, 6, dim, dtype=dtype), k, v)
    caches = []
    for backend in (cpu, ReferenceBackend()):
        stored = page(backend, [part], kv_dtype=kv_dtype, scales=scales)
        by_rope = [empty_cache(tuple(cache.shape), kv_dtype) for cache in stored[:2]]
        backend.rope_and_store_kv(qkv.clone(), QKNormRopeParams(dim, None, kv_scales=scales), *by_rope, stored[2])
        for whole, copy in zip(stored[:2], by_rope, strict=True):
            assert torch.equal(whole.view(torch.uint8), copy.view(torch.uint8))
        caches.append([cache.view(torch.uint8) for cache in stored[:2]])
    (k_ours, v_ours), (k_judge, v_judge) = caches
    size, pages = 16 * dim, len(k_ours)
    judged = [each.flatten(1)[:, : kv_heads * size].view(pages, 16, kv_heads, dim) for each in (k_judge, v_judge)]
    assert torch.equal(k_ours[..., :size].unflatten(2, (dim, 16)).permute(0, 3, 1, 2), judged[0])
    assert torch.equal(v_ours[..., :size].unflatten(2, (16, dim)).transpose(1, 2), judged[1])
    if scale_elements := num_scale_elements(kv_dtype):
        for ours, judge in ((k_ours, k_judge), (v_ours, v_judge)):
            expected = judge.flatten(1)[:, kv_heads * size :].view(pages, 16, kv_heads, scale_elements)
            assert torch.equal(ours[..., size:].unflatten(2, (16, scale_elements)).transpose(1, 2), expected)


@settings(max_examples=examples(25), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=4),
    chunks=st.lists(st.lists(st.sampled_from([0, 1, 7, 64, 600]), min_size=4, max_size=4), max_size=6),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from(DTYPES),
    kv_dtype=st.sampled_from(QUANTIZED_KV_DTYPES),
    dim=st.sampled_from([8, 16, 40, 64]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (14, 2)]),
    window=st.none() | st.integers(1, 400),
    softcap=st.sampled_from([None, 10.0]),
)
def test_quantized_kv_attention_bits_are_equal_in_random_chunked_batches(
    lengths: list[int],
    chunks: list[list[int]],
    seed: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    dim: int,
    heads: tuple[int, int],
    window: int | None,
    softcap: float | None,
) -> None:
    """Chunks of several sequences, mixed into steps at random, must equal each sequence computed alone and whole."""
    cpu = CpuBackend()
    if cpu.missing_reason:
        pytest.skip(cpu.missing_reason)
    generator = torch.Generator().manual_seed(seed)
    parts = [random_part(n, n, *heads, dim, dtype, generator) for n in lengths]
    assert_chunks_equal_whole(cpu, parts, chunks, seed, window=window, softcap=softcap, kv_dtype=kv_dtype)


@codes
@pytest.mark.usefixtures("keep_threads")
def test_quantized_kv_attention_bits_do_not_depend_on_thread_count(
    cpu: CpuBackend, kv_dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Many short pieces, and a few long ones whose tiles are spread over the threads."""
    for mix in ([(2300, 1)], [(1000, 300)], [(400, 1)] * 20):
        parts = [random_part(c, q, 6, 2, 64, torch.bfloat16, generator) for c, q in mix]
        torch.set_num_threads(1)
        alone = attend(cpu, parts, kv_dtype=kv_dtype)
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, attend(cpu, parts, kv_dtype=kv_dtype), alone)), (mix, threads)


@codes
def test_strided_quantized_kv_cache_gives_same_bits_as_contiguous(
    cpu: CpuBackend, kv_dtype: torch.dtype, generator: torch.Generator
) -> None:
    """A layer's cache may be a slice of one tensor for all layers, pages outermost."""
    part = random_part(70, 5, 4, 2, 32, torch.bfloat16, generator)
    k_cache, v_cache, metadata = page(cpu, [part], kv_dtype=kv_dtype)
    bytes_of = [cache.view(torch.uint8) for cache in (k_cache, v_cache)]
    k_layers, v_layers = (torch.stack([c, torch.zeros_like(c)], dim=1).view(kv_dtype) for c in bytes_of)
    straight = cpu.paged_attention(part.q, k_cache, v_cache, metadata, AttentionParams(0.2))
    strided = cpu.paged_attention(part.q, k_layers[:, 0], v_layers[:, 0], metadata, AttentionParams(0.2))
    assert torch.equal(straight, strided)
