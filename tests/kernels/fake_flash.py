"""Stand-ins for flash-attn 2 and PyTorch's varlen attention: documented signatures and checks, results computed in
plain PyTorch in float64. They record the calls.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.kernels.fake_capture import Refusing

PAGE_MULTIPLE = 256
DTYPES = (torch.float16, torch.bfloat16)


class FakeFlashAttn:
    """The module flash_attn, version 2.8. It follows the docstrings of flash_attn_interface.py."""

    __version__ = "2.8.3"

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        asked = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "paged": block_table is not None}
        self.calls.append(("varlen", asked))
        assert not dropout_p
        assert alibi_slopes is None
        assert not return_attn_probs
        check(q, k, v, block_table)
        return ragged(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, None,
            scale(softmax_scale, q), causal, window_size, softcap,
        )  # fmt: skip

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        self.calls.append(("kvcache", {"num_splits": num_splits, "window_size": window_size}))
        assert all(each is None for each in (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad))
        assert alibi_slopes is None
        assert not return_softmax_lse
        assert block_table is not None
        assert isinstance(cache_seqlens, Tensor)
        assert cache_seqlens.dtype == torch.int32
        assert cache_seqlens.shape == q.shape[:1]
        queries = q.shape[1]
        check(q.flatten(0, 1), k_cache, v_cache, block_table)
        keys, values = (cache[block_table.long()].flatten(1, 2) for cache in (k_cache, v_cache))
        at = torch.arange(keys.shape[1], device=q.device)
        query_at = cache_seqlens[:, None] - queries + torch.arange(queries, device=q.device)  # bottom right
        seen = visible(at[None, None], query_at[:, :, None], causal, window_size) & (at < cache_seqlens[:, None, None])
        return attend(q, keys, values, seen, scale(softmax_scale, q), softcap)


def fake_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn of PyTorch 2.13, limited to what its flash-attn 2 accepts."""
    assert return_aux is None
    assert num_splits == (None if block_table is None else 1), "paged and split it leaves rows unwritten"
    assert block_table is None or seqused_k is not None, "block_table requires seqused_k"
    assert cu_seq_k is not None
    assert enable_gqa or query.shape[1] == key.shape[-2]
    check(query, key, value, block_table)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return ragged(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, block_table, seqused_k, scale, False, window_size, 0.0
    )


def check(q: Tensor, k: Tensor, v: Tensor, block_table: Tensor | None) -> None:
    """Assert what flash-attn's C++ side requires. k, v: [pages, tokens, K, D], or [total, K, D] without a table."""
    assert q.dtype in DTYPES, "FlashAttention only supports fp16 and bf16"
    assert q.dtype == k.dtype == v.dtype
    assert k.shape == v.shape
    assert q.ndim == 3
    assert q.shape[1] % k.shape[-2] == 0
    assert q.shape[2] == k.shape[-1]
    assert q.shape[2] <= 256
    assert q.shape[2] % 8 == 0
    assert all(each.stride(-1) == 1 for each in (q, k, v)), "contiguous last dimension"
    assert k.ndim == (3 if block_table is None else 4)
    if block_table is not None:
        assert k.shape[1] % PAGE_MULTIPLE == 0, "paged KV cache block size must be divisible by 256"
        assert block_table.stride(-1) == 1 or block_table.shape[-1] == 1  # on the host NumPy's strides are left
        assert block_table.dtype == torch.int32


def ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    max_q: int,
    max_k: int,
    block_table: Tensor | None,
    used: Tensor | None,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    """Compute sequence by sequence. Outside of a capture, assert that arguments agree with both cumulative counts."""
    for starts in (query_start, key_start):
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        assert block_table is None or len(starts) == len(block_table) + 1
    if Refusing.depth:
        assert block_table is not None
        return ragged_there(q, k, v, query_start, key_start, block_table, scale, causal, window, softcap)
    starts, key_starts = query_start.tolist(), key_start.tolist()
    counts = [end - begin for begin, end in pairwise(starts)]
    lengths = [end - begin for begin, end in pairwise(key_starts)]
    assert used is None or used.tolist() == lengths
    assert max(counts) <= max_q
    assert max(lengths) <= max_k
    out = torch.full_like(q, torch.nan)
    for row, (begin, count, length) in enumerate(zip(starts, counts, lengths, strict=False)):
        if block_table is None:
            keys, values = (each[key_starts[row] : key_starts[row + 1]] for each in (k, v))
        else:
            pages = block_table[row, : -(-length // k.shape[1])].long()
            keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k, v))
        query_at = torch.arange(length - count, length)
        seen = visible(torch.arange(length)[None], query_at[:, None], causal, window)
        part = attend(q[begin : begin + count][None], keys[None], values[None], seen[None], scale, softcap)
        out[begin : begin + count] = part[0]
    return out


def ragged_there(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    block_table: Tensor,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> Tensor:
    """The same without host reads, so that a graph can hold it: all queries with each sequence's keys."""
    out, token = torch.full_like(q, torch.nan), torch.arange(len(q))
    for row, (pages, length) in enumerate(zip(block_table, key_start.diff(), strict=True)):
        keys, values = (cache[pages.long()].flatten(0, 1)[None] for cache in (k, v))
        at = torch.arange(keys.shape[1])
        first, end = query_start[row], query_start[row + 1]
        seen = visible(at[None], (token + length - end)[:, None], causal, window) & (at < length)
        part = attend(q[None], keys, values, seen[None], scale, softcap)[0]
        out = torch.where(((token >= first) & (token < end))[:, None, None], part, out)
    return out


def visible(key_at: Tensor, query_at: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
    """True where a query sees a key. -1 in a window is unlimited; causal means no key to the right."""
    left, right = window
    seen = torch.ones_like(key_at == query_at)
    if causal or right >= 0:
        seen &= key_at <= query_at + (0 if causal else right)
    if left >= 0:
        seen &= key_at >= query_at - left
    return seen


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float) -> Tensor:
    """q [B, Q, H, D], k, v [B, T, K, D], seen [B, Q, T]. Keys and values that are not seen may hold anything."""
    group = q.shape[2] // k.shape[2]
    used = seen.any(1)[:, :, None, None]
    k, v = (torch.where(used, x, torch.zeros_like(x)).double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bthd->bhqt", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhqt,bthd->bqhd", weights, v).to(q.dtype)


def scale(asked: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if asked is None else asked
