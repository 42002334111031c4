"""MLA kernels against direct float64 sums, with the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.kv_quantization import UNIT_KV_SCALES, KVScales
from quire.kernels.latent_params import LatentNormRopeParams
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import Part, attend, empty_cache, error, random_part

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
SIZES = [(512, 64), (32, 16), (30, 6), (48, 2)]
"""(L, R)"""
MIX = [(700, 3), (1, 1), (16, 16), (300, 45), (257, 1)]
"""Context lengths, and how many of their last tokens are queries."""


def parts(sizes: tuple[int, int], heads: int, dtype: torch.dtype, generator: torch.Generator) -> list[Part]:
    return [random_part(context, count, heads, 1, sum(sizes), dtype, generator) for context, count in MIX]


def expected(part: Part, values: int, scale: float) -> Tensor:
    """[queries, heads, values] in float64."""
    q, keys = part.q.double(), part.k.double()[:, 0]
    first = len(keys) - len(q)
    scores = torch.einsum("qhd,kd->qhk", q, keys) * scale
    at = torch.arange(len(q))[:, None, None] + first
    weights = scores.masked_fill(torch.arange(len(keys)) > at, -torch.inf).softmax(-1)
    return torch.einsum("qhk,kd->qhd", weights, keys[:, :values])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_attention_reads_values_from_key_prefix(
    cpu: CpuBackend, dtype: torch.dtype, sizes: tuple[int, int], generator: torch.Generator
) -> None:
    requests = parts(sizes, 5, dtype, generator)
    for backend in (cpu, ReferenceBackend()):
        outputs = attend(backend, requests, scale=0.1, values=sizes[0])
        for part, out in zip(requests, outputs, strict=True):
            assert out.shape == (*part.q.shape[:2], sizes[0])
            assert error(out, expected(part, sizes[0], 0.1)) < TOLERANCE[dtype], backend.name


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_attention_equals_attention_with_separate_value_cache(
    cpu: CpuBackend, dtype: torch.dtype, kv_dtype: torch.dtype | None, generator: torch.Generator
) -> None:
    """Here the values are whole keys. With 8-bit floats the values use the keys' scale."""
    requests = [Part(each.q, each.k, each.k) for each in parts((56, 8), 20, dtype, generator)]
    options = {"scale": 0.1, "kv_dtype": kv_dtype}
    wanted = attend(cpu, requests, **options, scales=KVScales(0.5, 0.5))
    assert all(map(torch.equal, attend(cpu, requests, **options, scales=KVScales(0.5, 3.0), values=64), wanted))


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_quantized_mla_attention_matches_reference(
    cpu: CpuBackend, sizes: tuple[int, int], kv_dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Both round keys in the same way."""
    requests = parts(sizes, 3, torch.float32, generator)
    scales = UNIT_KV_SCALES if kv_dtype == torch.int8 else KVScales(0.7, 9.0)
    options = {"scale": 0.1, "kv_dtype": kv_dtype, "scales": scales, "values": sizes[0]}
    for out, wanted in zip(
        attend(cpu, requests, **options), attend(ReferenceBackend(), requests, **options), strict=True
    ):
        assert error(out, wanted) < 1e-5


@pytest.mark.few(9)
@pytest.mark.usefixtures("keep_threads")
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
@pytest.mark.parametrize("heads", [1, 16, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mla_attention_bits_do_not_depend_on_batch_chunks_or_threads(
    cpu: CpuBackend, dtype: torch.dtype, heads: int, kv_dtype: torch.dtype | None, generator: torch.Generator
) -> None:
    requests = parts((64, 16), heads, dtype, generator)
    options = {"scale": 0.1, "values": 64, "kv_dtype": kv_dtype}
    alone = [attend(cpu, [part], **options)[0] for part in requests]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert all(map(torch.equal, attend(cpu, requests, seed=3, **options), alone))
        for part, whole in zip(requests, alone, strict=True):
            for begin, end in ((0, len(part.q) // 2), (len(part.q) // 2, len(part.q))):
                if begin < end:
                    assert torch.equal(attend(cpu, [part.rows(begin, end)], **options)[0], whole[begin:end])


def store(
    backend: Backend, q: Tensor, kv: Tensor, latent: LatentNormRopeParams, kv_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the queries, the cache, and the tokens' slots in it."""
    shape = backend.kv_cache_shape(4, 1, sum(latent.latent_and_rope_dims), kv_dtype)
    cache, slots = empty_cache(shape, kv_dtype), torch.tensor([3, 17, 63, 40, 18])
    nothing, positions = torch.zeros(2, dtype=torch.int32), torch.tensor([5, 0, 1, 30, 7])
    where = (nothing, nothing, nothing, nothing.view(1, 2), positions, slots, 0, 0)
    return backend.rope_and_store_latent_kv(q.clone(), kv, latent, cache, AttentionMetadata(*where)), cache, slots


@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_store_latent_kv_norms_latents_and_rotates_rope_dims(
    cpu: CpuBackend, dtype: torch.dtype, sizes: tuple[int, int], neighbours: bool, generator: torch.Generator
) -> None:
    size, rotated = sizes
    angles = torch.rand((40, rotated // 2), generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    latent = LatentNormRopeParams(torch.rand(size, generator=generator), 1e-6, table, neighbours)
    q, kv = (torch.randn((5, count), generator=generator).to(dtype) for count in (3 * sum(sizes), sum(sizes)))
    positions = torch.tensor([5, 0, 1, 30, 7])

    def rotate(x: Tensor) -> Tensor:
        """Rotate each pair as a complex number; the real parts come first."""
        first, second = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, -1)
        pairs = torch.complex(first.double(), second.double())
        pairs = pairs * torch.polar(torch.ones(1).double(), angles[positions].double()).unsqueeze(1)
        return torch.cat((pairs.real, pairs.imag), -1)

    heads, keys = q.view(5, 3, -1), kv.double()
    normed = (
        keys[:, :size] * (keys[:, :size].square().mean(1, keepdim=True) + 1e-6).rsqrt() * latent.norm_weight.double()
    )
    key = torch.cat((normed, rotate(kv[:, None, size:])[:, 0]), 1)
    for backend in (cpu, ReferenceBackend()):
        outputs, cache, slots = store(backend, q, kv, latent, dtype)
        assert torch.equal(outputs[..., :size], heads[..., :size])
        assert error(outputs[..., size:], rotate(heads[..., size:])) < TOLERANCE[dtype]
        pack = 4 // dtype.itemsize
        if backend is cpu:
            cache = cache.view(4, sum(sizes) // pack, 16, pack).transpose(1, 2)
        assert error(cache.reshape(64, -1)[slots], key) < TOLERANCE[dtype]
        untouched = torch.ones(64, dtype=torch.bool).index_fill_(0, slots, value=False)
        assert cache.reshape(64, -1)[untouched].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_latent_kv_keeps_order_and_numbers_without_rope(
    cpu: CpuBackend, dtype: torch.dtype, generator: torch.Generator
) -> None:
    norm = torch.rand(32, generator=generator)
    latent = LatentNormRopeParams(norm, 1e-6, None, is_interleaved=True, unrotated_dim=10)
    q, kv = (torch.randn((5, count), generator=generator).to(dtype) for count in (3 * 42, 42))
    for backend in (cpu, ReferenceBackend()):
        outputs, cache, slots = store(backend, q, kv, latent, dtype)
        assert torch.equal(outputs, q.view(5, 3, 42))
        if backend is cpu:
            pack = 4 // dtype.itemsize
            cache = cache.view(4, 42 // pack, 16, pack).transpose(1, 2)
        assert torch.equal(cache.reshape(64, -1)[slots][:, 32:], kv[:, 32:])


@pytest.mark.parametrize(("blocks", "inner", "outs", "passed"), [(16, 128, 512, 64), (3, 24, 30, 6), (5, 512, 128, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_per_head_linear_matches_float64_and_ignores_batch(
    cpu: CpuBackend, dtype: torch.dtype, blocks: int, inner: int, outs: int, passed: int, generator: torch.Generator
) -> None:
    weights = (torch.randn((blocks, outs, inner), generator=generator) / inner**0.5).to(dtype)
    x = torch.randn((200, blocks, inner + passed), generator=generator).to(dtype)
    wanted = torch.einsum("tbi,boi->tbo", x[..., :inner].double(), weights.double())
    for backend in (cpu, ReferenceBackend()):
        linear = backend.pack_per_head_linear(list(weights), passed)
        outputs = linear(x.flatten(1), NO_ADAPTERS)
        per_head = outputs.view(200, blocks, -1)
        assert error(per_head[..., :outs], wanted) < 10 * TOLERANCE[dtype] / (1 if dtype == torch.float32 else 10)
        assert torch.equal(per_head[..., outs:], x[..., inner:])
        for rows in (slice(0, 1), slice(3, 10), slice(150, 200)):
            assert torch.equal(linear(x[rows].flatten(1), NO_ADAPTERS), outputs[rows])
