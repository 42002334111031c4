"""Stand-ins for flash-attn 3 and 4, like those of tests/kernels/fake_flash.py for 2: documented signatures, the checks
of their sources, and results in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.kernels.fake_capture import Refusing
from tests.kernels.fake_flash import DTYPES, attend, ragged, scale, visible


class FakeFlash3:
    """The module flash_attn_interface. It follows hopper/flash_attn_interface.py and flash_api.cpp."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        self.calls.append({"q": q.ndim, "num_splits": num_splits, "window_size": window_size})
        assert all(each is None for each in (k, v, qv, rotary_cos, rotary_sin, cu_seqlens_k_new, cache_leftpad))
        assert not return_softmax_lse
        assert page_table is not None
        assert isinstance(cache_seqlens, Tensor)
        assert (max_seqlen_q is None) == (cu_seqlens_q is None), "max_seqlen_q must be provided if cu_seqlens_q is"
        return paged(
            q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
            window_size, softcap,
        )  # fmt: skip


class FakeFlash4:
    """flash_attn.cute on a GPU of this compute capability. It follows flash_attn/cute/interface.py."""

    def __init__(self, capability: int) -> None:
        self.major = capability
        self.calls: list[dict[str, Any]] = []

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        min_seqlen_k: int | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        gather_kv_indices: Tensor | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        self.calls.append({"q": q.ndim, "num_splits": num_splits, "window_size": window_size})
        assert self.major in (9, 10), "paged KV is not supported on SM 8.0 and 12.0"
        assert self.major == 10 or num_splits == 1, "SplitKV not supported on SM 9.0"
        assert page_table is not None
        assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
        assert seqused_k is not None
        assert max_seqlen_k is not None, "splits would be chosen for the whole cache"
        assert cu_seqlens_q is None or Refusing.depth or int(seqused_k.max()) <= max_seqlen_k
        assert q.shape[-1] <= (256 if self.major == 9 else 128)
        window = tuple(-1 if side is None else side for side in window_size)
        return paged(
            q, k, v, page_table, seqused_k, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window, softcap
        ), None  # fmt: skip


def paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    query_start: Tensor | None,
    max_query_len: int | None,
    asked: float | None,
    causal: bool,
    window: tuple[int, ...],
    softcap: float,
) -> Tensor:
    """q [T, H, D] with query_start [S + 1], or [S, Q, H, D] without."""
    assert q.dtype in DTYPES
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] <= 256
    assert q.shape[-2] % k.shape[2] == 0
    assert all(each.stride(-1) == 1 for each in (q, k, v, page_table))
    assert page_table.dtype == lengths.dtype == torch.int32
    assert lengths.shape == page_table.shape[:1]
    left, right = window
    if query_start is not None:
        assert max_query_len is not None
        key_start = torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)))
        longest = page_table.shape[1] * k.shape[1]
        return ragged(
            q, k, v, query_start, key_start, max_query_len, longest, page_table, None, scale(asked, q), causal,
            (left, right), softcap,
        )  # fmt: skip
    assert q.ndim == 4
    keys, values = (cache[page_table.long()].flatten(1, 2) for cache in (k, v))
    at = torch.arange(keys.shape[1])
    query_at = lengths[:, None] - q.shape[1] + torch.arange(q.shape[1])
    seen = visible(at[None, None], query_at[:, :, None], causal, (left, right)) & (at < lengths[:, None, None])
    return attend(q, keys, values, seen, scale(asked, q), softcap)
