from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.triton_kv_quantization import cache_format_and_views, integer_scale, to_float8, to_integer
from quire.kernels.gpu.triton_launch_sizes import next_power_of_2
from quire.kernels.latent_params import LatentNormRopeParams


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rope_and_store_latents(
    q, kv, weight, cos_sin, cache, scales, positions, slots, page_stride, eps, key_scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr,
    HALF_PAD: tl.constexpr, PAGE: tl.constexpr, ROTATED: tl.constexpr, NEIGHBOURS: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Rotate the last R elements of each head of q in place. One more program per token, after those of the heads,
    stores kv [T, L + R].
    """
    HALF: tl.constexpr = R // 2
    token, head, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, HALF_PAD)
    turned = tl.where(head < HEADS, q + (token * HEADS + head) * WIDTH + WIDTH - R, kv + token * (L + R) + L)
    inside = i < HALF
    if NEIGHBOURS:
        first_raw = tl.load(turned + 2 * i, mask=inside, other=0.0)
        second_raw = tl.load(turned + 2 * i + 1, mask=inside, other=0.0)
    else:
        first_raw = tl.load(turned + i, mask=inside, other=0.0)
        second_raw = tl.load(turned + HALF + i, mask=inside, other=0.0)
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if ROTATED:
        angle = cos_sin + tl.load(positions + token) * R + i
        cos, sin = tl.load(angle, mask=inside, other=0.0), tl.load(angle + HALF, mask=inside, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    first, second = first.to(first_raw.dtype), second.to(first_raw.dtype)
    if head < HEADS:
        tl.debug_barrier()  # all threads must have read before any thread writes
        tl.store(turned + i, first, mask=inside)
        tl.store(turned + HALF + i, second, mask=inside)
    else:
        d = tl.arange(0, L_PAD)
        low_raw = tl.load(kv + token * (L + R) + d, mask=d < L, other=0.0)
        low = low_raw.to(tl.float32)
        low *= tl.rsqrt(tl.sum(low * low, 0) / L + eps)
        low = (low * tl.load(weight + d, mask=d < L, other=0.0)).to(low_raw.dtype)
        slot = tl.load(slots + token)
        to = cache + slot // PAGE * page_stride + slot % PAGE * (L + R)
        low_wide, wide, other = low.to(tl.float32), first.to(tl.float32), second.to(tl.float32)
        if HELD == 1:
            most = tl.maximum(tl.max(tl.abs(wide), 0), tl.max(tl.abs(other), 0))
            held = integer_scale(tl.maximum(tl.max(tl.abs(low_wide), 0), most))
            tl.store(scales + slot // PAGE * (page_stride // 2) + PAGE * (L + R) // 2 + slot % PAGE, held)
            scale = held.to(tl.float32)
            tl.store(to + d, to_integer(low_wide, scale), mask=d < L)
            tl.store(to + L + i, to_integer(wide, scale), mask=inside)
            tl.store(to + L + HALF + i, to_integer(other, scale), mask=inside)
        elif HELD == 2:
            tl.store(to + d, to_float8(tl.div_rn(low_wide, key_scale)), mask=d < L)
            tl.store(to + L + i, to_float8(tl.div_rn(wide, key_scale)), mask=inside)
            tl.store(to + L + HALF + i, to_float8(tl.div_rn(other, key_scale)), mask=inside)
        else:
            tl.store(to + d, low, mask=d < L)
            tl.store(to + L + i, first, mask=inside)
            tl.store(to + L + HALF + i, second, mask=inside)


def rope_and_store_latent_kv(
    q: Tensor, kv: Tensor, latent: LatentNormRopeParams, cache: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """q is [T, H, any + R], absorbed or not."""
    size, rotated = latent.latent_and_rope_dims
    q, kv = q.contiguous(), kv.contiguous()
    if q.ndim == 2:
        q = q.view(len(q), -1, size + rotated)
    tokens, heads, width = q.shape
    kv_format, codes, scales = cache_format_and_views(cache)
    has_rope = latent.cos_sin is not None
    table = latent.norm_weight if latent.cos_sin is None else latent.cos_sin
    if tokens:
        rope_and_store_latents[tokens, heads + 1](
            q, kv, latent.norm_weight, table, codes, scales, metadata.positions, metadata.slot_mapping,
            cache.stride(0), latent.eps, latent.kv_scales.key, heads, width, size, next_power_of_2(size), rotated,
            next_power_of_2(rotated // 2), cache.shape[1], has_rope, has_rope and latent.is_interleaved, kv_format,
            num_warps=1,
        )  # fmt: skip
    return q
