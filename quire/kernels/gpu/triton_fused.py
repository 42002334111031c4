"""Kernels for the operations between matrix products and attention. Caches are [pages, page size, K, D]. Arithmetic and
norm weights are float32. Results are rounded once. Bits do not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.triton_kv_quantization import cache_format_and_views, integer_scale, to_float8, to_integer
from quire.kernels.gpu.triton_launch_sizes import cdiv, next_power_of_2
from quire.kernels.qk_norm_rope import QKNormRopeParams

_GATE_BLOCK = 1024
_ROPE_HEADS = 8


@triton.jit
def norm_row_with_residual(
    x, residual, weight, bias, at, i, inside, eps, SIZE: tl.constexpr, ADD: tl.constexpr, CENTRED: tl.constexpr
):  # fmt: skip
    """ADD: norm x + residual, and store that sum to residual. CENTRED: LayerNorm with bias, otherwise RMSNorm."""
    value = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        beside = tl.load(residual + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + beside.to(tl.float32)).to(value.dtype)
        tl.store(residual + at, value, mask=inside)
    wide = value.to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / SIZE, 0.0)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    wide *= tl.load(weight + i, mask=inside, other=0.0)
    if CENTRED:
        wide += tl.load(bias + i, mask=inside, other=0.0)
    return wide.to(value.dtype)


@triton.jit
def _norm_kernel(
    out, x, residual, weight, bias, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """x is [rows, SIZE]."""
    i = tl.arange(0, BLOCK)
    at, inside = tl.program_id(0).to(tl.int64) * SIZE + i, i < SIZE
    tl.store(
        out + at, norm_row_with_residual(x, residual, weight, bias, at, i, inside, eps, SIZE, ADD, CENTRED), mask=inside
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return layer_norm(x, weight, None, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Apply LayerNorm, or RMSNorm if bias is None."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch_norm(out, x, None, weight, bias, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return add_layer_norm(x, residual, weight, None, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """RMSNorm if bias is None. Overwrites and returns x and residual if they are contiguous."""
    x, residual = x.contiguous(), residual.contiguous()
    _launch_norm(x, x, residual, weight, bias, eps)
    return x, residual


def _launch_norm(
    out: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> None:
    size = x.shape[-1]
    block, warps = row_block_size_and_warps(size)
    if x.numel():
        _norm_kernel[x.numel() // size,](
            out, x, x if residual is None else residual, weight, weight if bias is None else bias, eps, size, block,
            residual is not None, bias is not None, num_warps=warps,
        )  # fmt: skip


def row_block_size_and_warps(size: int) -> tuple[int, int]:
    """In blocks of 512 to 8,192 numbers, a thread loads 32 bytes of bfloat16."""
    block = next_power_of_2(size)
    return block, min(16, max(1, block // 512))


@triton.jit
def gated_activation(gate_up, size, i, inside, GELU: tl.constexpr):
    """A row of gate_up has `size` gates, then the values that they gate."""
    gate = tl.load(gate_up + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + size + i, mask=inside, other=0.0)
    slope = gate
    if GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2u, as (1 + tanh(u)) / 2 is sigmoid(2u)
    value = gate / (1.0 + tl.exp(-slope)) * up.to(tl.float32)
    return value.to(up.dtype)


@triton.jit
def _gate_kernel(out, gate_up, size, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out [rows, size] from gate_up [rows, 2 * size]."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    tl.store(out + row * size + i, gated_activation(gate_up + row * 2 * size, size, i, inside, GELU), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    return _launch_gate(gate_up, gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    return _launch_gate(gate_up, gelu=True)


def _launch_gate(gate_up: Tensor, *, gelu: bool) -> Tensor:
    gate_up = gate_up.contiguous()
    *rows, width = gate_up.shape
    out = gate_up.new_empty((*rows, width // 2))
    if out.numel():
        grid = (gate_up.numel() // width, cdiv(width // 2, _GATE_BLOCK))
        _gate_kernel[grid](out, gate_up, width // 2, gelu, _GATE_BLOCK, num_warps=4)
    return out


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store_kv_kernel(
    k, v, k_cache, v_cache, slots, k_stride, v_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """k and v are [T, WIDTH]."""
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    within = slot % PAGE * WIDTH + i
    inside = i < WIDTH
    tl.store(k_cache + slot // PAGE * k_stride + within, tl.load(k + token * WIDTH + i, mask=inside), mask=inside)
    tl.store(v_cache + slot // PAGE * v_stride + within, tl.load(v + token * WIDTH + i, mask=inside), mask=inside)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    k, v = k.contiguous(), v.contiguous()
    width = k.shape[1] * k.shape[2]
    block, warps = row_block_size_and_warps(width)
    if len(slots):
        _store_kv_kernel[len(slots),](
            k, v, k_cache, v_cache, slots, k_cache.stride(0), v_cache.stride(0), width, block, k_cache.shape[1],
            num_warps=warps,
        )  # fmt: skip


@triton.jit
def _norm_head_halves(half, inverse, weight, inside, chosen):
    """Return one half of each head, [heads, half] float32, normed where `chosen`."""
    return tl.where(chosen, half * inverse * tl.load(weight, mask=inside, other=0.0), half)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _norm_rope_store_kernel(
    q, qkv, cos_sin, q_norm, k_norm, k_cache, v_cache, k_scales, v_scales, positions, slots, k_stride, v_stride,
    eps, key_scale, value_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, ROTATE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """qkv [T, HEADS + 2 * KV_HEADS, D]."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    i = tl.arange(0, HALF_PAD)[None, :]
    HALF: tl.constexpr = D // 2
    is_q, is_k = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = head >= HEADS + KV_HEADS
    inside = (i < HALF) & (head < HEADS + 2 * KV_HEADS)
    at = qkv + token * ((HEADS + 2 * KV_HEADS) * D) + head * D + i
    first_raw, second_raw = tl.load(at, mask=inside, other=0.0), tl.load(at + HALF, mask=inside, other=0.0)
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if Q_NORM or K_NORM:
        inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)[:, None]
        if Q_NORM:
            first = _norm_head_halves(first, inverse, q_norm + i, i < HALF, is_q)
            second = _norm_head_halves(second, inverse, q_norm + HALF + i, i < HALF, is_q)
        if K_NORM:
            first = _norm_head_halves(first, inverse, k_norm + i, i < HALF, is_k)
            second = _norm_head_halves(second, inverse, k_norm + HALF + i, i < HALF, is_k)
    if ROTATE:
        angle = cos_sin + tl.load(positions + token) * D + i
        cos, sin = tl.load(angle, mask=i < HALF, other=0.0), tl.load(angle + HALF, mask=i < HALF, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    first, second = first.to(first_raw.dtype), second.to(first_raw.dtype)
    to_q = q + token * (HEADS * D) + head * D + i
    tl.store(to_q, first, mask=inside & is_q)
    tl.store(to_q + HALF, second, mask=inside & is_q)
    slot = tl.load(slots + token)
    row = slot % PAGE * (KV_HEADS * D) + i
    if HELD:
        first = tl.where(is_v, first_raw, first).to(tl.float32)
        second = tl.where(is_v, second_raw, second).to(tl.float32)
    if HELD == 1:
        most = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))[:, None]
        rounded = integer_scale(most)
        first, second = to_integer(first, rounded.to(tl.float32)), to_integer(second, rounded.to(tl.float32))
        within = PAGE * KV_HEADS * D // 2 + slot % PAGE * KV_HEADS + head - HEADS
        tl.store(k_scales + slot // PAGE * (k_stride // 2) + within, rounded, mask=is_k)
        inner = is_v & (head < HEADS + 2 * KV_HEADS)
        tl.store(v_scales + slot // PAGE * (v_stride // 2) + within - KV_HEADS, rounded, mask=inner)
    elif HELD == 2:
        divisor = tl.where(is_v, value_scale, key_scale)
        first, second = to_float8(tl.div_rn(first, divisor)), to_float8(tl.div_rn(second, divisor))
    if HELD:
        first_raw, second_raw = first, second
    to_k = k_cache + slot // PAGE * k_stride + row + (head - HEADS) * D
    tl.store(to_k, first, mask=inside & is_k)
    tl.store(to_k + HALF, second, mask=inside & is_k)
    to_v = v_cache + slot // PAGE * v_stride + row + (head - HEADS - KV_HEADS) * D
    tl.store(to_v, first_raw, mask=inside & is_v)
    tl.store(to_v + HALF, second_raw, mask=inside & is_v)


def rope_and_store_kv(
    qkv: Tensor, rope: QKNormRopeParams, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata
) -> Tensor:
    qkv = qkv.contiguous()
    page, kv_heads = k_cache.shape[1:3]
    dim = rope.head_dim
    cos_sin = rope.cos_sin
    q_norm = rope.q_norm
    k_norm = rope.k_norm
    tokens, total = len(qkv), qkv.shape[1] // dim
    heads = total - 2 * kv_heads
    q = qkv.new_empty((tokens, heads, dim))
    half, scales = next_power_of_2(dim // 2), rope.kv_scales
    kv_format, keys, k_scales = cache_format_and_views(k_cache)
    _, values, v_scales = cache_format_and_views(v_cache)
    if tokens:
        _norm_rope_store_kernel[tokens, cdiv(total, _ROPE_HEADS)](
            q, qkv, *(qkv if each is None else each for each in (cos_sin, q_norm, k_norm)), keys, values, k_scales,
            v_scales, metadata.rope_positions, metadata.slot_mapping, k_cache.stride(0), v_cache.stride(0), rope.eps,
            scales.key, scales.value, heads, kv_heads, dim, half, page, _ROPE_HEADS, q_norm is not None,
            k_norm is not None, cos_sin is not None, kv_format, num_warps=2,
        )  # fmt: skip
    return q
