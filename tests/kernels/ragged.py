"""Ragged batches for the kernel tests: sequences with known keys and values, paged into any backend's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import NO_ADAPTERS, AttentionMetadata, Backend, Linear
from quire.kernels.gpu.prefill_decode_split import PrefillDecodeSplit
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES, UNIT_KV_SCALES, KVScales


@dataclass(frozen=True)
class Part:
    """Keys and values of a whole sequence [context, K, D], and the queries [queries, H, D] of its last tokens."""

    q: Tensor
    k: Tensor
    v: Tensor

    def rows(self, begin: int, end: int) -> Part:
        """Queries begin to end of this part, as a chunk that is computed when no later token is known."""
        context = len(self.k) - len(self.q) + end
        return Part(self.q[begin:end], self.k[:context], self.v[:context])

    def to(self, dtype: torch.dtype) -> Part:
        return Part(self.q.to(dtype), self.k.to(dtype), self.v.to(dtype))


def random_part(
    context: int, queries: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, generator: torch.Generator
) -> Part:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return Part(draw(queries, heads, dim), draw(context, kv_heads, dim), draw(context, kv_heads, dim))


def page(
    backend: Backend,
    parts: list[Part],
    *,
    seed: int = 0,
    spare: int = 3,
    kv_dtype: torch.dtype | None = None,
    scales: KVScales = UNIT_KV_SCALES,
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """Caches and metadata for a step of these parts, on pages in random order. Unwritten elements are NaN, as are the
    scales of quantized caches.
    """
    size, dtype = backend.block_size, kv_dtype or parts[0].k.dtype
    kv_heads, dim = parts[0].k.shape[1:]
    needs = [-(-len(part.k) // size) for part in parts]
    total = sum(needs) + spare
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.full((len(parts), max(needs)), int(order[-1]), dtype=torch.int32)
    shape = backend.kv_cache_shape(total, kv_heads, dim, dtype)
    k_cache, v_cache = (empty_cache(shape, dtype) for _ in range(2))
    slots, positions, taken = [], [], 0
    for row, (part, need) in enumerate(zip(parts, needs, strict=True)):
        table[row, :need] = order[taken : taken + need]
        taken += need
        at = torch.arange(len(part.k))
        where = table[row, at // size].long() * size + at % size
        backend.store_kv(part.k, part.v, k_cache, v_cache, where, scales)
        slots.append(where[len(at) - len(part.q) :])
        positions.append(at[len(at) - len(part.q) :])
    lengths = [len(part.q) for part in parts]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    contexts = [len(part.k) for part in parts]
    metadata = AttentionMetadata(
        query_start=starts,
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        key_start=torch.tensor([0, *contexts]).cumsum(0).to(torch.int32),
        block_table=table,
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        max_query_len=max(lengths),
        max_context_len=max(contexts),
        is_full_prefill=lengths == contexts,
    )
    counts = (torch.tensor(lengths).numpy(), torch.tensor(contexts).numpy(), metadata.key_start.numpy())
    if (division := PrefillDecodeSplit.from_lengths(*counts)) is not None:
        begins = [torch.from_numpy(each.copy()) for each in (division.query_start, division.key_start)]
        metadata = division.metadata_with_parts(metadata, *begins, size)
    return k_cache, v_cache, metadata


def to_device(metadata: AttentionMetadata, device: str | torch.device) -> AttentionMetadata:
    fields = {name: getattr(metadata, name) for name in AttentionMetadata.__slots__}
    there = {name: each.to(device) for name, each in fields.items() if isinstance(each, Tensor)}
    return replace(
        metadata, **there, decode_prefill_parts=tuple(to_device(part, device) for part in metadata.decode_prefill_parts)
    )


def attended_on(
    device: torch.device,
    attention: Callable[..., Tensor],
    given: tuple[Tensor, ...],
    metadata: AttentionMetadata,
    softmax: AttentionParams,
) -> Tensor:
    """Attention of q and two CPU caches, computed on `device`. The result is on the CPU."""
    if softmax.sinks is not None:
        softmax = replace(softmax, sinks=softmax.sinks.to(device))
    return attention(*(x.to(device) for x in given), to_device(metadata, device), softmax).cpu()


def empty_cache(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An unwritten cache: NaN, or for quantized types bytes that are NaN as scales and as 8-bit floats."""
    if dtype in QUANTIZED_KV_DTYPES:
        return torch.full(shape, 255, dtype=torch.uint8).view(dtype)
    return torch.full(shape, torch.nan, dtype=dtype)


def attend(
    backend: Backend,
    parts: list[Part],
    *,
    seed: int = 0,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    ahead: int | None = 0,
    bias: Tensor | None = None,
    kv_dtype: torch.dtype | None = None,
    scales: KVScales = UNIT_KV_SCALES,
    sinks: Tensor | None = None,
    values: int | None = None,
    chunked: bool = False,
) -> list[Tensor]:
    """Each part's attention output, all computed in one step. values: see Softmax; then no part's v is read."""
    k_cache, v_cache, metadata = page(backend, parts, seed=seed, kv_dtype=kv_dtype, scales=scales)
    q = torch.cat([part.q for part in parts])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    softmax = AttentionParams(scale, window, softcap, ahead, bias, scales, sinks, values, chunked)
    out = backend.paged_attention(q, k_cache, v_cache if values is None else k_cache, metadata, softmax)
    return list(out.split([len(part.q) for part in parts]))


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value. NaN counts as infinite."""
    difference = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(difference.nan_to_num(torch.inf))


def assert_chunks_equal_whole(
    backend: Backend, parts: list[Part], chunks: list[list[int]], seed: int, **rules: Any
) -> None:
    """Sequences in steps of `chunks`, in which each takes some tokens or none, and a last one of all that is left, must
    equal each sequence computed alone and whole.
    """
    whole = [attend(backend, [part], **rules)[0] for part in parts]
    lengths, done = [len(part.q) for part in parts], [0] * len(parts)
    for sizes in [*chunks, lengths]:
        ends = [min(length, begin + size) for length, begin, size in zip(lengths, done, sizes, strict=False)]
        step = [(i, begin, end) for i, (begin, end) in enumerate(zip(done, ends, strict=True)) if begin < end]
        if not step:
            continue
        outs = attend(backend, [parts[i].rows(b, e) for i, b, e in step], seed=seed + 1, **rules)
        for (i, begin, end), out in zip(step, outs, strict=True):
            assert torch.equal(out, whole[i][begin:end]), (i, begin, end)
        done = ends
    assert done == lengths


def assert_rows_equal_whole(linear: Linear, x: Tensor) -> None:
    """`x`: at least 400 rows. Single rows, some rows, and all with other numbers of threads give the same bits."""
    whole = linear(x, NO_ADAPTERS)
    for begin, rows in [(0, 1), (3, 1), (399, 1), (7, 2), (50, 3), (20, 6), (1, 7), (11, 64), (200, 193)]:
        assert torch.equal(linear(x[begin : begin + rows], NO_ADAPTERS), whole[begin : begin + rows]), (begin, rows)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(linear(x, NO_ADAPTERS), whole), threads
        assert torch.equal(linear(x[:90], NO_ADAPTERS), whole[:90]), threads  # few rows: panels may be split by rows
