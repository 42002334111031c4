"""Norms, gates, RoPE and KV stores of the CPU backend against the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.parameters.activation import ACTIVATION_KINDS, Activation
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import attend, error, page, random_part

reference = ReferenceBackend()
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (7, 256), (3, 50), (200, 2048), (2, 3, 64)])
def test_rms_norm_matches_reference(
    cpu: CpuBackend, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, weight = torch.randn(shape, generator=generator).to(dtype), torch.randn(shape[-1:], generator=generator)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert error(cpu.rms_norm(x, weight, 1e-5), expected) < TOLERANCE[dtype]
    assert error(cpu.rms_norm(x.mT.contiguous().mT, weight, 1e-5), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (7, 50), (200, 2048)])
def test_add_rms_norm_matches_reference(
    cpu: CpuBackend, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, residual = torch.randn((2, *shape), generator=generator).to(dtype)
    weight = torch.randn(shape[1:], generator=generator)
    total = x + residual
    expected = reference.rms_norm(total.double(), weight.double(), 1e-5)
    normed, summed = cpu.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, total)
    assert error(normed, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 384), (7, 50), (200, 2048), (3, 5)])
def test_layer_norm_matches_reference(
    cpu: CpuBackend, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, residual = (torch.randn((2, *shape), generator=generator) * 2 + 3).to(dtype)
    weight, bias = torch.randn((2, shape[1]), generator=generator)
    expected = reference.layer_norm(x.double(), weight.double(), bias.double(), 1e-5)
    assert error(cpu.layer_norm(x, weight, bias, 1e-5), expected) < 3 * TOLERANCE[dtype]
    total = x + residual
    expected = reference.layer_norm(total.double(), weight.double(), bias.double(), 1e-5)
    normed, summed = cpu.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert torch.equal(summed, total)
    assert error(normed, expected) < 3 * TOLERANCE[dtype]


ACTIVATIONS = [
    *(Activation(kind, slope=0.7) for kind in ACTIVATION_KINDS if kind != "xielu"),
    Activation("xielu", 0.8, 1.3, 0.5),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1536), (7, 37), (300, 704)])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda each: each.kind)
def test_activations_match_reference(
    cpu: CpuBackend, activation: Activation, shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = (torch.randn(shape, generator=generator) * 4).to(dtype)
    assert (
        error(cpu.apply_activation(x.clone(), activation), reference.apply_activation(x.double(), activation))
        < TOLERANCE[dtype]
    )
    rows = torch.cat([cpu.apply_activation(row.clone()[None], activation) for row in x])
    assert torch.equal(rows, cpu.apply_activation(x.clone(), activation)), "a row's bits do not depend on the others"
    assert torch.equal(cpu.add_residual(x, rows.clone()), x + rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("each", [1, 5, 64])
@pytest.mark.parametrize("shape", [(1, 6), (7, 1), (300, 16)])
def test_sigmoid_mul_matches_reference(
    cpu: CpuBackend, shape: tuple[int, int], each: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """One gate per element, or one for several adjacent elements."""
    gate = (torch.randn(shape, generator=generator) * 4).to(dtype)
    x = torch.randn((shape[0], shape[1] * each), generator=generator).to(dtype)
    output = cpu.sigmoid_mul(x.clone(), gate)
    assert error(output, reference.sigmoid_mul(x.double(), gate.double())) < TOLERANCE[dtype]
    rows = [cpu.sigmoid_mul(x[at : at + 1].clone(), gate[at : at + 1]) for at in range(shape[0])]
    assert torch.equal(torch.cat(rows), output), "a row's bits do not depend on the others"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize("shape", [(1, 3072), (7, 36), (300, 704)])
def test_silu_and_gelu_mul_match_reference(
    cpu: CpuBackend, shape: tuple[int, int], gate: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    x = (torch.randn(shape, generator=generator) * 8).to(dtype)
    assert error(getattr(cpu, gate)(x), getattr(reference, gate)(x.double())) < TOLERANCE[dtype]


@pytest.mark.parametrize("gate", ["silu_mul", "gelu_mul"])
def test_silu_and_gelu_mul_are_precise_in_tails(cpu: CpuBackend, gate: str) -> None:
    """The error is relative to each value, not to the largest: in the tails 1 + tanh would cancel."""
    x = torch.linspace(-6, 6, 1000)[None]
    both = torch.cat([x, torch.ones_like(x)], dim=1)
    expected = getattr(reference, gate)(both.double())
    if gate == "gelu_mul":  # torch's function cancels, too
        u = (2 / torch.pi) ** 0.5 * (x.double() + 0.044715 * x.double() ** 3)
        expected = x.double() * torch.sigmoid(2 * u)
    assert ((getattr(cpu, gate)(both) - expected) / expected).abs().max() < 3e-6


@pytest.mark.parametrize(("gate", "small"), [("silu_mul", -20 / (1 + 485165195.4)), ("gelu_mul", 0.0)])
def test_silu_and_gelu_mul_handle_extreme_inputs(cpu: CpuBackend, gate: str, small: float) -> None:
    ends = torch.tensor([[0.0, 100.0, 1e30, torch.inf, -20.0, -100.0, -1e30, torch.nan]])
    got = getattr(cpu, gate)(torch.cat([ends, torch.ones_like(ends)], dim=1))[0]
    assert got[:4].tolist() == [0.0, 100.0, float(ends[0, 2]), torch.inf]
    assert float(got[4]) == pytest.approx(small, rel=1e-5, abs=1e-30)
    assert abs(float(got[5])) < 1e-30
    assert got[7].isnan()


def test_float64_uses_reference_kernels(cpu: CpuBackend) -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    weight = torch.ones(8, dtype=torch.float64)
    assert torch.equal(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(cpu.add_rms_norm(x, x, weight, 1e-5)[0], reference.add_rms_norm(x, x, weight, 1e-5)[0])
    assert torch.equal(cpu.silu_mul(x), reference.silu_mul(x))
    assert torch.equal(cpu.gelu_mul(x), reference.gelu_mul(x))


def rope_tables(positions: int, dim: int) -> Tensor:
    angles = torch.outer(torch.arange(positions).double(), 10000.0 ** -(torch.arange(0, dim, 2).double() / dim))
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def empty_cache(metadata: AttentionMetadata, kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = reference.kv_cache_shape(int(metadata.block_table.max()) + 1, kv_heads, dim, dtype)
    return torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.few(15)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 64, 80, 96, 1030])
@pytest.mark.parametrize(("normed", "rotate"), [(False, True), (True, True), (True, False)])
def test_rope_and_store_kv_matches_reference(
    cpu: CpuBackend, dim: int, normed: bool, rotate: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """A mixed step: attention must find the stored keys and values."""
    heads, kv_heads = 6, 2
    parts = [random_part(c, q, heads, kv_heads, dim, dtype, generator) for c, q in [(1, 1), (40, 40), (300, 2)]]
    k_cache, v_cache, metadata = page(cpu, parts)
    wide = [part.to(torch.float64) for part in parts]
    k_wide, v_wide, _ = page(reference, wide)
    tokens = len(metadata.slot_mapping)
    qkv = torch.randn((tokens, (heads + 2 * kv_heads) * dim), generator=generator).to(dtype)
    norms = [1 + torch.randn(dim, generator=generator) / 4 if normed else None for _ in range(2)]
    rope = QKNormRopeParams(dim, rope_tables(300, dim).float() if rotate else None, *norms, 1e-5)
    expected = reference.rope_and_store_kv(qkv.double(), rope, k_wide, v_wide, metadata)
    got = cpu.rope_and_store_kv(qkv, rope, k_cache, v_cache, metadata)
    assert got.shape == (tokens, heads, dim)
    assert error(got, expected) < TOLERANCE[dtype]
    out = cpu.paged_attention(got, k_cache, v_cache, metadata, AttentionParams(dim**-0.5))
    expected_output = reference.paged_attention(expected, k_wide, v_wide, metadata, AttentionParams(dim**-0.5))
    assert error(out, expected_output) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 50, 96])
@pytest.mark.parametrize("norm", ["whole", "centred", "after", "heads"])
def test_qk_norm_kinds_and_query_scales_match_reference(
    cpu: CpuBackend, norm: Any, dim: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    heads, kv_heads = 6, 2
    parts = [random_part(c, q, heads, kv_heads, dim, dtype, generator) for c, q in [(1, 1), (300, 12)]]
    k_cache, v_cache, metadata = page(cpu, parts)
    k_wide, v_wide, _ = page(reference, [part.to(torch.float64) for part in parts])
    qkv = (torch.randn((len(metadata.slot_mapping), (heads + 2 * kv_heads) * dim), generator=generator) * 2 + 1).to(
        dtype
    )
    sizes = (heads, kv_heads) if norm in ("whole", "centred") else (1, 1)
    norms = [1 + torch.randn(count * dim, generator=generator) / 4 for count in sizes]
    scales = 1 + torch.rand(300, generator=generator) if norm == "heads" else None
    rope = QKNormRopeParams(dim, rope_tables(300, dim).float(), *norms, 1e-5, norm_kind=norm, q_scale=scales)
    expected = reference.rope_and_store_kv(qkv.double(), rope, k_wide, v_wide, metadata)
    got = cpu.rope_and_store_kv(qkv, rope, k_cache, v_cache, metadata)
    assert error(got, expected) < TOLERANCE[dtype]
    out = cpu.paged_attention(got, k_cache, v_cache, metadata, AttentionParams(dim**-0.5))
    expected_output = reference.paged_attention(expected, k_wide, v_wide, metadata, AttentionParams(dim**-0.5))
    assert error(out, expected_output) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", ["all", "keys", "queries"])
def test_rope_and_store_kv_handles_partial_projections(
    cpu: CpuBackend, given: Any, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Computed by hand. Values are normed without weights; with keys alone the values are the keys before norm and
    rotation; with queries alone the cache stays unchanged.
    """
    heads, kv_heads, dim = 6, 2, 40
    part = random_part(70, 70, heads, kv_heads, dim, dtype, generator)
    k_cache, v_cache, metadata = page(cpu, [part])
    before = [each.clone() for each in (k_cache, v_cache)]
    q_norm, k_norm = (1 + torch.randn(dim, generator=generator) / 4 for _ in range(2))
    projected = {"all": 2, "keys": 1, "queries": 0}[given]
    qkv = torch.randn((70, (heads + projected * kv_heads) * dim), generator=generator).to(dtype)
    rope = QKNormRopeParams(
        dim, rope_tables(70, dim).float(), q_norm, k_norm, 1e-5, v_norm=torch.ones(dim), projections=given
    )
    got = cpu.rope_and_store_kv(qkv.clone(), rope, k_cache, v_cache, metadata)
    if given == "queries":
        pairs = zip((k_cache, v_cache), before, strict=True)
        assert all(torch.equal(each.view(torch.uint8), was.view(torch.uint8)) for each, was in pairs)
        k, v = part.k.double(), part.v.double()
    else:
        k, v = (qkv.view(70, -1, dim)[:, first:][:, :kv_heads].double() for first in (heads, -kv_heads))
        v = v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        k = k / (k.square().mean(-1, keepdim=True) + 1e-5).sqrt() * k_norm
        cosine, sine = rope_tables(70, dim)[:, None].chunk(2, dim=-1)
        first, second = k.chunk(2, dim=-1)
        k = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    judged = [torch.zeros(reference.kv_cache_shape(len(k_cache), kv_heads, dim, torch.float64)).double() for _ in "kv"]
    reference.store_kv(k, v, *judged, metadata.slot_mapping)
    out = cpu.paged_attention(got, k_cache, v_cache, metadata, AttentionParams(dim**-0.5))
    expected_output = reference.paged_attention(got.double(), *judged, metadata, AttentionParams(dim**-0.5))
    assert error(out, expected_output) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_mul_by_column_slice_matches_product(cpu: CpuBackend, dtype: torch.dtype, generator: torch.Generator) -> None:
    x, other = (torch.randn((33, width), generator=generator).to(dtype) for width in (37, 90))
    expected = x.double() * other[:, 21:58].double()
    for backend in (cpu, reference):
        assert error(backend.mul_by_column_slice(x.clone(), other, 21), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv_in_parts_leaves_other_tokens_unchanged(
    cpu: CpuBackend, dtype: torch.dtype, generator: torch.Generator
) -> None:
    part = random_part(90, 90, 2, 2, 48, dtype, generator)
    k_cache, v_cache, metadata = page(cpu, [part])
    again = [torch.full_like(cache, torch.nan) for cache in (k_cache, v_cache)]
    for begin, end in ((45, 90), (0, 13), (13, 45)):
        cpu.store_kv(part.k[begin:end], part.v[begin:end], *again, metadata.slot_mapping[begin:end])
    assert torch.equal(again[0].view(torch.uint8), k_cache.view(torch.uint8))
    assert torch.equal(again[1].view(torch.uint8), v_cache.view(torch.uint8))
    assert torch.equal(
        attend(cpu, [part])[0][-1], cpu.paged_attention(part.q, *again, metadata, AttentionParams(48**-0.5))[-1]
    )


def test_slot_outside_cache_raises_index_error(cpu: CpuBackend, generator: torch.Generator) -> None:
    part = random_part(20, 20, 2, 2, 16, torch.float32, generator)
    k_cache, v_cache, metadata = page(cpu, [part])
    metadata.slot_mapping[3] = k_cache.shape[0] * cpu.block_size
    before = k_cache.clone()
    with pytest.raises(IndexError, match="slots"):
        cpu.store_kv(part.k, part.v, k_cache, v_cache, metadata.slot_mapping)
    qkv = torch.ones(20, 6 * 16)
    with pytest.raises(IndexError, match="slots"):
        cpu.rope_and_store_kv(qkv, QKNormRopeParams(16, rope_tables(20, 16).float()), k_cache, v_cache, metadata)
    assert torch.equal(before.nan_to_num(7), k_cache.nan_to_num(7))
