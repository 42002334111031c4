"""MLA in Triton against direct float64 sums and the reference; with fixed tiles the same bits in any batch and
chunking.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend
from quire.kernels.gpu import triton_launch_sizes
from quire.kernels.gpu.mla import absorbed_attention
from quire.kernels.gpu.triton_backend import TritonBackend
from quire.kernels.kv_quantization import UNIT_KV_SCALES, KVScales
from quire.kernels.latent_params import LatentNormRopeParams
from quire.kernels.mla.per_head_linear import as_worthwhile_expandable_or_none
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import Part, empty_cache, error, page, random_part, to_device
from tests.kernels.test_latent import MIX, TOLERANCE, expected

DTYPES = (torch.float32, torch.bfloat16)
SIZES = [(32, 16, 5, 16), (30, 6, 3, 64), (512, 64, 2, 256)]
"""L, R, heads, and tokens per block."""


def attended(
    backend: Backend, parts: list[Part], values: int, device: torch.device, *, seed: int = 0, **held: object
) -> list[Tensor]:
    judge = ReferenceBackend()
    judge.block_size = backend.block_size
    scales = held.get("scales", UNIT_KV_SCALES)
    cache, _, metadata = page(judge, parts, seed=seed, **held)  # type: ignore[arg-type]
    q = torch.cat([part.q for part in parts]).to(device)
    softmax, cache = AttentionParams(0.1, value_dim=values, kv_scales=scales), cache.to(device)  # type: ignore[arg-type]
    out = backend.paged_attention(q, cache, cache, to_device(metadata, device), softmax)
    return list(out.cpu().split([len(part.q) for part in parts]))


def make_backend(size: int, *, fixed: bool = False) -> TritonBackend:
    backend = TritonBackend(deterministic=fixed)
    backend.block_size = size
    return backend


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("latent", "rotated", "heads", "size"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mla_attention_matches_reference(
    device: torch.device,
    dtype: torch.dtype,
    latent: int,
    rotated: int,
    heads: int,
    size: int,
    fixed: bool,
    generator: torch.Generator,
) -> None:
    mix = [(530, 3), (1, 1), (16, 16), (40, 1)] if latent == 512 else MIX
    parts = [random_part(context, count, heads, 1, latent + rotated, dtype, generator) for context, count in mix]
    ones = [part.rows(len(part.q) - 1, len(part.q)) for part in parts]
    for given in (parts, ones, sorted(parts, key=lambda part: len(part.q))):
        for part, out in zip(given, attended(make_backend(size, fixed=fixed), given, latent, device), strict=True):
            assert out.shape == (*part.q.shape[:2], latent)
            assert error(out, expected(part, latent, 0.1)) < TOLERANCE[dtype]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("heads", [20, 40])
def test_mla_attention_with_hopper_tiles_matches_reference(
    device: torch.device, heads: int, fixed: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absorbed_attention, "is_hopper", lambda device: True)
    parts = [random_part(context, count, heads, 1, 48, torch.bfloat16, generator) for context, count in MIX]
    ones = [part.rows(len(part.q) - 1, len(part.q)) for part in parts]
    for given in (parts, ones):
        for part, out in zip(given, attended(make_backend(16, fixed=fixed), given, 32, device), strict=True):
            assert error(out, expected(part, 32, 0.1)) < TOLERANCE[torch.bfloat16]


def test_mla_attention_with_many_splits_matches_reference(
    device: torch.device, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch_sizes, "num_multiprocessors", lambda device: 132)
    parts = [random_part(context, 1, 2, 1, 48, torch.float32, generator) for context in (3000, 70)]
    for part, out in zip(parts, attended(make_backend(16), parts, 32, device), strict=True):
        assert error(out, expected(part, 32, 0.1)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mla_attention_on_quantized_kv_matches_reference(
    device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, generator: torch.Generator
) -> None:
    parts = [random_part(context, count, 5, 1, 48, dtype, generator) for context, count in MIX]
    scales = UNIT_KV_SCALES if kv_dtype == torch.int8 else KVScales(0.7, 9.0)
    given = {"kv_dtype": kv_dtype, "scales": scales}
    found = attended(make_backend(16), parts, 32, device, **given)
    judge = attended(ReferenceBackend(), [part.to(torch.float64) for part in parts], 32, torch.device("cpu"), **given)
    for out, wanted in zip(found, judge, strict=True):
        assert error(out, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [2, 6, 18])
def test_deterministic_mla_row_bits_do_not_depend_on_batch(
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row is decoded alone, in any chunk, or in one prompt, with partial results stored or merged. The most heads use
    the tiles of an H100.
    """
    if heads == 18:
        monkeypatch.setattr(absorbed_attention, "is_hopper", lambda device: True)
    backend = make_backend(16, fixed=True)
    part = random_part(520, 18, heads, 1, 40, dtype, generator)
    (whole,) = attended(backend, [part], 32, device)
    other = random_part(20, 1, heads, 1, 40, dtype, generator)
    for begin, end, beside in ((0, 1, 0), (0, 11, 0), (11, 13, 2), (17, 18, 9)):
        parts = [*[other] * beside, part.rows(begin, end)]
        chunk = attended(backend, parts, 32, device, seed=end)[-1]
        assert torch.equal(chunk, whole[begin:end]), (begin, end, beside)
    monkeypatch.setattr(triton_launch_sizes, "num_multiprocessors", lambda device: 0)
    assert torch.equal(attended(backend, [other, part], 32, device)[1], whole)


def make_latent_params(
    size: int, rotated: int, neighbours: bool, generator: torch.Generator, device: torch.device
) -> LatentNormRopeParams:
    angles = torch.rand((40, rotated // 2), generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    return LatentNormRopeParams(torch.rand(size, generator=generator).to(device), 1e-6, table, neighbours)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("neighbours", [True, False, None])
@pytest.mark.parametrize(("size", "rotated"), [(512, 64), (30, 6)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stored_latent_kv_matches_reference(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    rotated: int,
    neighbours: bool | None,
    kv_dtype: torch.dtype | None,
    generator: torch.Generator,
) -> None:
    """neighbours None: without RoPE."""
    latent = make_latent_params(size, rotated, neighbours is not False, generator, torch.device("cpu"))
    table = None if neighbours is None else latent.cos_sin
    latent = replace(latent, cos_sin=table, unrotated_dim=rotated)
    latent = replace(latent, kv_scales=KVScales(0.5) if kv_dtype == torch.float8_e4m3fn else UNIT_KV_SCALES)
    table = None if table is None else table.to(device)
    there = replace(latent, norm_weight=latent.norm_weight.to(device), cos_sin=table)
    q, kv = torch.randn((5, 3 * (size + rotated)), generator=generator), torch.randn(5, size + rotated)
    slots, positions = torch.tensor([3, 17, 63, 40, 18]), torch.tensor([5, 0, 1, 30, 7])
    nothing = torch.zeros((1, 2), dtype=torch.int32)
    step = AttentionMetadata(nothing[0], nothing[0], nothing[0], nothing, positions, slots, 0, 0)
    found, caches = [], []
    for backend, where, own in ((ReferenceBackend(), torch.device("cpu"), latent), (TritonBackend(), device, there)):
        held = kv_dtype or dtype
        cache = empty_cache(backend.kv_cache_shape(4, 1, size + rotated, held), held).to(where)
        given = (each.to(where, dtype) for each in (q, kv))
        found.append(backend.rope_and_store_latent_kv(*given, own, cache, to_device(step, where)).cpu())
        caches.append(cache.cpu())
    assert found[1].shape == (5, 3, size + rotated)
    assert error(found[1], found[0]) < TOLERANCE[dtype]
    mine, judge = (each.view(torch.uint8).float() if kv_dtype else each.float().nan_to_num(7.0) for each in caches)
    if kv_dtype is None:
        assert error(judge, mine) < TOLERANCE[dtype]
    else:  # a number halfway between two codes may become either
        assert ((mine != judge).float().mean()) < 2e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("blocks", "inner", "outs", "passed"), [(3, 24, 30, 6), (2, 128, 200, 64), (2, 70, 16, 0)])
def test_per_head_linear_matches_float64(
    device: torch.device,
    dtype: torch.dtype,
    blocks: int,
    inner: int,
    outs: int,
    passed: int,
    generator: torch.Generator,
) -> None:
    weights = (torch.randn((blocks, outs, inner), generator=generator) / inner**0.5).to(dtype)
    x = torch.randn((70, blocks, inner + passed), generator=generator).to(dtype)
    wanted = torch.einsum("tbi,boi->tbo", x[..., :inner].double(), weights.double())
    for fixed in (False, True):
        linear = TritonBackend(deterministic=fixed).pack_per_head_linear(list(weights.to(device)), passed)
        whole = linear(x.flatten(1).to(device), NO_ADAPTERS).cpu()
        for rows in (slice(0, 70), slice(3, 8)):
            found = linear(x[rows].flatten(1).to(device), NO_ADAPTERS).cpu()
            given = found.view(len(found), blocks, -1)
            assert error(given[..., :outs], wanted[rows]) < TOLERANCE[dtype]
            assert torch.equal(given[..., outs:], x[rows][..., inner:])
            assert not fixed or torch.equal(found, whole[rows])


@pytest.mark.parametrize(("plain", "rotated", "value"), [(24, 8, 20), (16, 16, 32)])
def test_expanded_mla_matches_absorbed_mla(
    device: torch.device, plain: int, rotated: int, value: int, generator: torch.Generator
) -> None:
    """Both parts of a key together or apart."""
    heads, size = 3, 40
    backend, lengths = TritonBackend(), (37, 5, 16, 1, 39)
    latent = make_latent_params(size, rotated, True, generator, device)
    absorb = torch.randn((heads, size, plain), generator=generator) * plain**-0.5
    expand = torch.randn((heads, value, size), generator=generator) * size**-0.5
    q = torch.randn((sum(lengths), heads * (plain + rotated)), generator=generator).to(device)
    kv = torch.randn((sum(lengths), size + rotated), generator=generator).to(device)
    parts = [random_part(length, length, 1, 1, 8, torch.float32, generator) for length in lengths]
    metadata = to_device(page(ReferenceBackend(), parts)[2], device)
    cache = empty_cache(backend.kv_cache_shape(16, 1, size + rotated, torch.float32), torch.float32).to(device)
    softmax = AttentionParams(0.3, value_dim=size)
    assert metadata.is_full_prefill
    halves = [
        backend.pack_per_head_linear(list(each.to(device)), passed) for each, passed in ((absorb, rotated), (expand, 0))
    ]
    blocks = as_worthwhile_expandable_or_none(halves[0], cache, metadata)
    assert blocks is not None
    assert None is as_worthwhile_expandable_or_none(
        TritonBackend(deterministic=True).pack_per_head_linear(list(absorb), rotated), cache, metadata
    )
    turned = backend.rope_and_store_latent_kv(halves[0](q, NO_ADAPTERS), kv, latent, cache, metadata)
    attended = backend.paged_attention(turned, cache, cache, metadata, softmax)
    wanted = halves[1](attended.flatten(1), NO_ADAPTERS)
    heads_of_q = backend.rope_and_store_latent_kv(q.view(-1, heads, plain + rotated), kv, latent, cache, metadata)
    found = blocks.attend_expanded(heads_of_q, halves[1], cache, metadata, softmax)
    assert error(found.cpu(), wanted.cpu()) < 1e-5
