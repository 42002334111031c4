"""Triton on 8-bit KV caches: attention against float64 on the rounded values, the codes that rope_and_store_kv writes,
and the bitwise contract.
"""

from __future__ import annotations

import pytest
import torch

from quire.kernels.gpu import triton_fused
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES, UNIT_KV_SCALES, KVScales
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import Part, attend, empty_cache, error, page, random_part
from tests.kernels.test_kv_quantization import on_codes
from tests.kernels.triton.test_attention import DECODE, DTYPES, MIXED, TOLERANCE, Paged, to_device

reference = ReferenceBackend()
codes = pytest.mark.parametrize("kv_dtype", QUANTIZED_KV_DTYPES, ids=str)


@codes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mix", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("dim", "window", "softcap", "fixed"), [(64, None, None, False), (96, 100, 5.0, True), (128, 16, None, False)]
)
def test_quantized_kv_attention_matches_reference(
    device: torch.device,
    mix: list[tuple[int, int]],
    dim: int,
    window: int | None,
    softcap: float | None,
    fixed: bool,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    scales = UNIT_KV_SCALES if kv_dtype == torch.int8 else KVScales(0.05, 1.7)
    parts = [random_part(c, q, 6, 2, dim, dtype, generator) for c, q in mix]
    judged = [on_codes(part, kv_dtype, scales) for part in parts]
    expected = attend(reference, judged, window=window, softcap=softcap)
    backend = Paged(16, device, fixed=fixed)
    got = attend(backend, parts, window=window, softcap=softcap, kv_dtype=kv_dtype, scales=scales)
    for row, (mine, judge) in enumerate(zip(got, expected, strict=True)):
        assert error(mine, judge) < TOLERANCE[dtype], f"sequence {row}"


@codes
def test_split_quantized_kv_attention_matches_reference(
    device: torch.device, kv_dtype: torch.dtype, generator: torch.Generator
) -> None:
    parts = [random_part(c, 1, 2, 1, 64, torch.bfloat16, generator) for c in (1100, 3)]
    expected = attend(reference, [on_codes(part, kv_dtype) for part in parts])
    for fixed in (False, True):
        for mine, judge in zip(attend(Paged(16, device, fixed=fixed), parts, kv_dtype=kv_dtype), expected, strict=True):
            assert error(mine, judge) < TOLERANCE[torch.bfloat16]


@codes
def test_quantized_kv_attention_keeps_small_float16_values(
    device: torch.device, kv_dtype: torch.dtype, generator: torch.Generator
) -> None:
    """With many keys of small values, weights times scales would be below float16's normal numbers."""
    part = random_part(900, 1, 2, 1, 64, torch.float16, generator)
    small = Part(part.q, part.k * 0.1, part.v * 2**-9)
    scales = UNIT_KV_SCALES if kv_dtype == torch.int8 else KVScales(0.05, 2**-13)
    (expected,) = attend(reference, [on_codes(small, kv_dtype, scales)])
    (got,) = attend(Paged(16, device), [small], kv_dtype=kv_dtype, scales=scales)
    assert error(got, expected) < 4e-3


@codes
def test_fixed_split_quantized_kv_attention_bits_do_not_depend_on_batch(
    device: torch.device, kv_dtype: torch.dtype, generator: torch.Generator
) -> None:
    """A row has the same bits decoded alone, in any chunk, or in one prompt."""
    backend = Paged(16, device, fixed=True)
    part = random_part(520, 18, 2, 1, 32, torch.bfloat16, generator)
    whole = attend(backend, [part], kv_dtype=kv_dtype)[0]
    other = random_part(20, 1, 2, 1, 32, torch.bfloat16, generator)
    for begin, end, beside in ((0, 1, 0), (0, 11, 0), (11, 13, 2), (17, 18, 33)):
        chunk = attend(backend, [*[other] * beside, part.rows(begin, end)], seed=end, kv_dtype=kv_dtype)[-1]
        assert torch.equal(chunk, whole[begin:end]), (begin, end, beside)


@codes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", [UNIT_KV_SCALES, KVScales(0.01, 3.0)], ids=["unscaled", "scaled"])
def test_rope_and_store_kv_codes_equal_reference(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, scales: KVScales, generator: torch.Generator
) -> None:
    """Codes and scales are equal bit for bit, also for zeros, tiny and huge numbers. No other byte changes."""
    heads, kv_heads, dim = 4, 3, 24
    parts = [random_part(c, q, heads, kv_heads, dim, dtype, generator) for c, q in [(1, 1), (9, 9), (30, 20)]]
    k_cache, _, metadata = page(reference, parts, kv_dtype=kv_dtype)
    tokens = len(metadata.slot_mapping)
    sizes = torch.tensor([0.0, 1e-30, 1e-3, 1.0, 50.0, 1e4]).repeat(tokens)[: tokens * (heads + 2 * kv_heads), None]
    qkv = (torch.randn((len(sizes), dim), generator=generator) * sizes).to(dtype).view(tokens, -1)
    rope = QKNormRopeParams(dim, None, kv_scales=scales)
    mine, judge = ([empty_cache(tuple(k_cache.shape), kv_dtype) for _ in range(2)] for _ in range(2))
    expected = reference.rope_and_store_kv(qkv.clone(), rope, *judge, metadata)
    there = [cache.to(device) for cache in mine]
    got = triton_fused.rope_and_store_kv(qkv.to(device), rope, *there, to_device(metadata, device))
    assert torch.equal(got.cpu(), expected)
    for ours, theirs in zip(there, judge, strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), theirs.view(torch.uint8))
