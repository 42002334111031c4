"""Kernels address pools of more than 2**31 elements as they do small ones. Untouched memory costs nothing on the host;
a GPU must have it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.triton_backend import TritonBackend
from quire.kernels.latent_params import LatentNormRopeParams
from quire.kernels.qk_norm_rope import QKNormRopeParams
from quire.kernels.recurrent.short_conv import ConvStates, ShortConv
from quire.kernels.reference import ReferenceBackend
from tests.kernels.ragged import page, random_part, to_device

_NUMBERS = 2**31
_BYTES = 12 * 2**30
CONTEXTS = [(40, 1), (33, 1), (21, 5)]


@pytest.fixture(autouse=True)
def _room(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < _BYTES:
        pytest.skip("the GPU has less memory")


def at_end_of_large_tensor(small: Tensor) -> tuple[Tensor, int]:
    """`small` at the end of a large tensor, after untouched pages or slots; and the number of these."""
    others = -(-_NUMBERS // small[0].numel())
    large = torch.empty((others + len(small), *small.shape[1:]), dtype=small.dtype, device=small.device)
    large[others:].copy_(small)
    return large, others


def shift_blocks(metadata: AttentionMetadata, pages: int, size: int) -> AttentionMetadata:
    parts = tuple(shift_blocks(each, pages, size) for each in metadata.decode_prefill_parts)
    table, slots = metadata.block_table + pages, metadata.slot_mapping + pages * size
    return replace(metadata, block_table=table, slot_mapping=slots, decode_prefill_parts=parts)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("size", [16, 256])
def test_attention_works_beyond_2_31_elements(
    device: torch.device, size: int, kv_dtype: torch.dtype | None, generator: torch.Generator
) -> None:
    backend, paged = TritonBackend(), ReferenceBackend()  # the test fills pages on the CPU
    backend.block_size = paged.block_size = size
    parts = [random_part(context, count, 4, 2, 64, torch.bfloat16, generator) for context, count in CONTEXTS]
    k_cache, v_cache, metadata = page(paged, parts, kv_dtype=kv_dtype)
    metadata, k_cache, v_cache = to_device(metadata, device), k_cache.to(device), v_cache.to(device)
    qkv = torch.randn((sum(count for _, count in CONTEXTS), 8 * 64), generator=generator).bfloat16().to(device)

    def compute(k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        q = backend.rope_and_store_kv(qkv.clone(), QKNormRopeParams(64, None), k_cache, v_cache, metadata)
        return backend.paged_attention(q, k_cache, v_cache, metadata, AttentionParams(0.125, None))

    (far_k, pages), (far_v, _) = at_end_of_large_tensor(k_cache), at_end_of_large_tensor(v_cache)
    output = compute(far_k, far_v, shift_blocks(metadata, pages, size))
    assert torch.equal(output, compute(k_cache, v_cache, metadata))
    assert output.isfinite().all()
    for far, small in ((far_k, k_cache), (far_v, v_cache)):
        assert torch.equal(far[pages:].view(torch.uint8), small.view(torch.uint8))


def test_mla_works_beyond_2_31_elements(device: torch.device, generator: torch.Generator) -> None:
    backend, context = TritonBackend(), 40
    cache = torch.randn((3, 16, 1, 128 + 64), generator=generator).bfloat16().to(device)
    turns = torch.randn((64, 64), generator=generator).to(device)
    latent = LatentNormRopeParams(torch.ones(128, device=device), 1e-6, turns, False)
    kv = torch.randn((1, 128 + 64), generator=generator).bfloat16().to(device)
    query = torch.randn((1, 4 * (128 + 64)), generator=generator).bfloat16().to(device)
    one = torch.tensor([0, 1], dtype=torch.int32)
    table, at = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([context - 1])
    metadata = AttentionMetadata(one, one[1:] * context, one * context, table, at, 16 + at % 16, 1, context)
    metadata = to_device(metadata, device)

    def compute(cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        q = backend.rope_and_store_latent_kv(query.clone(), kv, latent, cache, metadata)
        return backend.paged_attention(q, cache, cache, metadata, AttentionParams(0.1, value_dim=128))

    far, pages = at_end_of_large_tensor(cache)
    assert torch.equal(compute(far, shift_blocks(metadata, pages, 16)), compute(cache, metadata))
    assert torch.equal(far[pages:], cache)


def test_short_conv_states_work_beyond_2_31_elements(device: torch.device, generator: torch.Generator) -> None:
    channels, tokens = 64, 20
    weight = torch.randn((3, channels), generator=generator).to(device)
    recent = torch.randn((3, 10, channels), generator=generator).bfloat16().to(device)
    x = torch.randn((tokens, channels), generator=generator).bfloat16().to(device)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    at = torch.arange(5, 5 + tokens)
    metadata = AttentionMetadata(starts, starts[1:] + 5, starts, torch.zeros((1, 2), dtype=torch.int32), at, at, 20, 25)
    metadata = replace(to_device(metadata, device), state_slots=torch.tensor([1], device=device))

    def compute(recent: Tensor, metadata: AttentionMetadata) -> Tensor:
        conv = ShortConv(weight, None, is_gated=False)
        return TritonBackend().short_conv(x, conv, ConvStates(None, 16, recent), metadata)

    far, slots = at_end_of_large_tensor(recent)
    assert metadata.state_slots is not None
    output = compute(far, replace(metadata, state_slots=metadata.state_slots + slots))
    assert torch.equal(output, compute(recent, metadata))
    assert torch.equal(far[slots:], recent)
