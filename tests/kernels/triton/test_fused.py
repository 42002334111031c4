"""Norms, gates, RoPE and KV stores in Triton against the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels.gpu import triton_fused
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import error, page, random_part
from tests.kernels.triton.test_attention import Paged, to_device

reference = ReferenceBackend()
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (3, 50), (2, 3, 64), (0, 64)])
def test_rms_norm_matches_reference(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, weight = torch.randn(shape, generator=generator).to(dtype), torch.randn(shape[-1:], generator=generator)
    got = triton_fused.rms_norm(x.to(device), weight.to(device), 1e-5).cpu()
    assert got.shape == shape
    if len(x):
        assert error(got, reference.rms_norm(x.double(), weight.double(), 1e-5)) < TOLERANCE[dtype]
        apart = x.mT.contiguous().mT.to(device)
        assert torch.equal(triton_fused.rms_norm(apart, weight.to(device), 1e-5).cpu(), got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (7, 50)])
def test_add_rms_norm_matches_reference(
    device: torch.device, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, residual = torch.randn((2, *shape), generator=generator).to(dtype)
    weight = torch.randn(shape[1:], generator=generator)
    total = x + residual
    expected = reference.rms_norm(total.double(), weight.double(), 1e-5)
    normed, summed = triton_fused.add_rms_norm(x.to(device), residual.to(device), weight.to(device), 1e-5)
    assert torch.equal(summed.cpu(), total)
    assert error(normed.cpu(), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (3, 50), (2, 3, 64), (0, 64)])
def test_layer_norm_matches_reference(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Inputs with a large mean, and the sum of two tensors."""
    x, residual = (torch.randn((2, *shape), generator=generator) + 3).to(dtype)
    weight, bias = torch.randn((2, shape[-1]), generator=generator)
    there = (weight.to(device), bias.to(device), 1e-5)
    got = triton_fused.layer_norm(x.to(device), *there).cpu()
    assert got.shape == shape
    given = (each.to(device, copy=True) for each in (x, residual))  # a CPU .to() would not copy
    normed, summed = triton_fused.add_layer_norm(*given, *there)
    assert torch.equal(summed.cpu(), x + residual)
    if len(x):
        wide = (weight.double(), bias.double(), 1e-5)
        assert error(got, reference.layer_norm(x.double(), *wide)) < TOLERANCE[dtype]
        assert error(normed.cpu(), reference.layer_norm((x + residual).double(), *wide)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize("shape", [(1, 3072), (7, 36), (2, 3, 64), (0, 64)])
def test_silu_and_gelu_mul_match_reference(
    device: torch.device, shape: tuple[int, ...], gate: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = (torch.randn(shape, generator=generator) * 8).to(dtype)
    got = getattr(triton_fused, gate)(x.to(device)).cpu()
    assert got.shape == (*shape[:-1], shape[-1] // 2)
    if len(x):
        assert error(got, getattr(reference, gate)(x.double())) < TOLERANCE[dtype]


def test_silu_mul_handles_extreme_inputs(device: torch.device) -> None:
    gate = torch.tensor([[0.0, 100.0, 1e30, torch.inf, -20.0, -100.0, torch.nan]])
    got = triton_fused.silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1).to(device))[0].cpu()
    assert got[:4].tolist() == [0.0, 100.0, float(gate[0, 2]), torch.inf]
    assert float(got[4]) == pytest.approx(-20 / (1 + 485165195.4), rel=1e-5)
    assert abs(float(got[5])) < 1e-30
    assert got[6].isnan()


def rope_tables(positions: int, dim: int) -> Tensor:
    angles = torch.outer(torch.arange(positions).double(), 10000.0 ** -(torch.arange(0, dim, 2).double() / dim))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "size"), [(64, 16), (80, 256), (96, 16)])
@pytest.mark.parametrize(("normed", "rotate"), [("", True), ("qk", True), ("qk", False), ("q", True)])
def test_rope_and_store_kv_matches_reference(
    device: torch.device,
    dim: int,
    size: int,
    normed: str,
    rotate: bool,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    """No slot outside of the mapping changes."""
    heads, kv_heads, backend = 6, 2, Paged(size, device)
    parts = [random_part(c, q, heads, kv_heads, dim, dtype, generator) for c, q in [(1, 1), (9, 9), (300, 2)]]
    k_cache, v_cache, metadata = page(backend, parts)
    qkv = torch.randn((len(metadata.slot_mapping), (heads + 2 * kv_heads) * dim), generator=generator).to(dtype)
    norms = [1 + torch.randn(dim, generator=generator) / 4 if name in normed else None for name in "qk"]
    table = rope_tables(300, dim).float() if rotate else None

    def run(module: object, kind: torch.dtype, where: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        caches = [cache.to(where, kind, copy=True) for cache in (k_cache, v_cache)]
        angles, *weights = (None if each is None else each.to(where) for each in (table, *norms))
        there = to_device(metadata, where)
        q = module.rope_and_store_kv(qkv.to(where, kind), QKNormRopeParams(dim, angles, *weights, 1e-5), *caches, there)
        return q.cpu(), caches[0].cpu(), caches[1].cpu()

    expected = run(reference, torch.float64, torch.device("cpu"))
    for got, judge in zip(run(triton_fused, dtype, device), expected, strict=True):
        assert got.shape == judge.shape
        assert torch.equal(got.isnan(), judge.isnan())
        assert error(got.nan_to_num(0), judge.nan_to_num(0)) < 1.5 * TOLERANCE[dtype]


def test_rope_uses_position_override(device: torch.device, generator: torch.Generator) -> None:
    """Image tokens rotate by their own table row; later tokens by another position than their own."""
    heads, kv_heads, dim = 6, 2, 72
    parts = [random_part(c, q, heads, kv_heads, dim, torch.float32, generator) for c, q in [(1, 1), (40, 40), (300, 2)]]
    k_cache, v_cache, metadata = page(Paged(16, device), parts)
    qkv = torch.randn((len(metadata.slot_mapping), (heads + 2 * kv_heads) * dim), generator=generator)
    turns = torch.randint(0, 60, (len(qkv),), generator=generator)
    rope, turned = QKNormRopeParams(dim, rope_tables(60, dim).float()), replace(metadata, rope_position_override=turns)
    expected = reference.rope_and_store_kv(qkv.double(), rope, k_cache.double(), v_cache.double(), turned)
    there = replace(to_device(turned, device), rope_position_override=turns.to(device))
    found = triton_fused.rope_and_store_kv(
        qkv.to(device), QKNormRopeParams(dim, rope.cos_sin.to(device)), k_cache.to(device), v_cache.to(device), there
    )
    assert error(found.cpu(), expected) < 1.5 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("size", [16, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_kv_writes_only_mapped_slots(
    device: torch.device, size: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    part = random_part(40, 40, 2, 2, 48, dtype, generator)
    k_cache, v_cache, metadata = page(Paged(size, device), [part])
    got = [torch.full_like(cache, torch.nan, device=device) for cache in (k_cache, v_cache)]
    triton_fused.store_kv(part.k.to(device), part.v.to(device), *got, metadata.slot_mapping.to(device))
    for mine, judge in zip(got, (k_cache, v_cache), strict=True):
        assert torch.equal(mine.cpu().isnan(), judge.isnan())
        assert torch.equal(mine.cpu().nan_to_num(0), judge.nan_to_num(0))
