"""scaled_dot_product_attention over gathered KV, for GPUs without a paged kernel. Gathering reads and writes KV again,
so a decode takes about three times as long.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.images.bidirectional_attention import attend_bidirectional, can_attend_bidirectional
from quire.kernels.gpu.prefill_decode_split import attend_by_parts
from quire.kernels.gpu.torch_backend import TorchBackend
from quire.kernels.kv_quantization import QUANTIZED_KV_DTYPES


class SdpaBackend(TorchBackend):
    """Pages are [page, token, KV head, head_dim]."""

    name = "sdpa"
    block_size = 16
    cuda_graph_support = "decodes"

    def description(self) -> str:
        return f"torch {torch.__version__}'s scaled_dot_product_attention over gathered blocks, otherwise plain PyTorch"

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        return "has no softcap" if softcap else None

    def unsupported_kv_dtype_reason(self, kv_dtype: torch.dtype) -> str | None:
        return "keeps keys and values in the model's type" if kv_dtype in QUANTIZED_KV_DTYPES else None

    def unsupported_attention_reason(self, *, sinks: bool, latents: bool, chunks: bool) -> str | None:
        if sinks:
            return "has no attention sinks"
        return "has no MLA" if latents else None

    def make_context_parallel_backend(self, ranks: int) -> None:
        return None

    def is_batch_invariant(self, device: torch.device, dtype: torch.dtype) -> bool:
        return False  # sums depend on the batch's longest context

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        if can_attend_bidirectional(k_cache, softmax):
            return attend_bidirectional(q, k_cache, v_cache, metadata, softmax)
        if (
            softmax.softcap is not None
            or softmax.relative_bias is not None
            or softmax.sinks is not None
            or softmax.lookahead != 0
        ):
            return super().paged_attention(q, k_cache, v_cache, metadata, softmax)
        return attend_by_parts(lambda rows, part: _attend_batch(rows, k_cache, v_cache, part, softmax), q, metadata)


def _attend_batch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
) -> Tensor:
    if metadata.max_query_len == 1:  # the host reads no results, so CUDA graphs can record it
        return _attend_decodes(q, k_cache, v_cache, metadata.block_table, metadata.context_lens, softmax)
    out = torch.empty_like(q)
    starts = metadata.query_start.tolist()
    contexts = metadata.context_lens.tolist()
    for s, context in enumerate(contexts):
        rows = slice(starts[s], starts[s + 1])
        pages = metadata.block_table[s, : -(-context // k_cache.shape[1])].long()
        k, v = (cache[pages].flatten(0, 1)[:context] for cache in (k_cache, v_cache))
        out[rows] = _attend_prompt(q[rows], k, v, softmax)
    return out


def _attend_decodes(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, softmax: AttentionParams
) -> Tensor:
    """q [S, H, D] has each context's last query."""
    k, v = (cache[table.long()].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))  # [S, K, L, D]
    at = torch.arange(k.shape[2], device=q.device)
    seen = at < lens[:, None]
    if softmax.window is not None:
        seen &= at >= softmax.first_visible_key(lens[:, None] - 1)
    unseen = ~seen[:, None, :, None]  # unwritten KV may be NaN, which a weight of 0 does not cancel
    k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    return _call_sdpa(q[:, :, None], k, v, seen[:, None, None], softmax)[:, :, 0]


def _attend_prompt(q: Tensor, k: Tensor, v: Tensor, softmax: AttentionParams) -> Tensor:
    """q [T, H, D] has the last T of C tokens. k and v are [C, K, D]."""
    keys = torch.arange(len(k), device=q.device)
    query_positions = keys[len(k) - len(q) :, None]
    seen = keys <= query_positions
    if softmax.window is not None:
        seen &= keys >= softmax.first_visible_key(query_positions)
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    return _call_sdpa(q, k, v, seen, softmax)[0].transpose(0, 1)


def _call_sdpa(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softmax: AttentionParams) -> Tensor:
    """q [S, H, T, D]; k, v [S, K, L, D]."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax.scale, enable_gqa=grouped)
