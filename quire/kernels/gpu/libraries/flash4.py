"""flash-attn 4 for Hopper and data-center Blackwell: flash_attn.cute of package flash-attn-4, which compiles itself at
its first call. Written against flash_attn/cute/interface.py of 4.0.0b36.

Paged ragged keys need compute capability 9 or 10, and splits need 10. On 10, heads of 256 elements do not work with
`seqused_k`, the number of keys per sequence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.libraries.flash_backend import FlashLibraryBackend, import_library

INSTALL = "pip install 'flash-attn-4>=4.0.0b36'"
"""All versions so far are betas, which pip installs only if the requirement names one."""
_MAX_BLACKWELL_HEAD_DIM = 128
_CACHE_VARIABLE = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
"""Environment variable without which every start compiles anew. FLASH_ATTENTION_CUTE_DSL_CACHE_DIR names the cache's
folder, which is a temporary one by default.
"""


class Flash4Backend(FlashLibraryBackend):
    name = "flash4"
    block_size = 128
    """The number of keys per tile on Blackwell, so that TMA can read pages."""
    package = "flash-attn-4"
    compute_majors = (9, 10)
    batch_variance_reason = "its tiles and splits depend on the batch"

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(_import_flash4(), deterministic=deterministic)

    def unsupported_reason(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        reason = super().unsupported_reason(device, dtype, head_dim, softcap)
        if reason is None and self.can_split_keys(device) and head_dim > _MAX_BLACKWELL_HEAD_DIM:
            return f"takes heads up to {_MAX_BLACKWELL_HEAD_DIM} on this GPU, not {head_dim}"
        return reason

    def can_split_keys(self, device: torch.device) -> bool:
        return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10

    def attend_batch_part(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        """If Triton is available, it computes decodes on Hopper, where flash-attn does not support splits. Without
        `max_seqlen_k`, flash-attn would choose splits for the whole cache.
        """
        one_each = metadata.max_query_len == 1
        fallback = self._ops_for(q)
        if one_each and fallback.name == "triton" and not self.can_split_keys(q.device):
            return fallback.paged_attention(q, k_cache, v_cache, metadata, softmax)
        window = softmax.window_if_limiting(metadata.max_context_len)
        ragged = {} if one_each else {"cu_seqlens_q": metadata.query_start, "max_seqlen_q": metadata.max_query_len}
        out, _ = self._library(
            q.unsqueeze(1) if one_each else q,
            k_cache,
            v_cache,
            max_seqlen_k=metadata.max_context_len,
            seqused_k=metadata.context_lens,
            page_table=metadata.block_table,
            softmax_scale=softmax.scale,
            causal=True,
            # (left, right); our window includes the query, left does not
            window_size=(None, None) if window is None else (window - 1, 0),
            softcap=softmax.softcap or 0.0,
            num_splits=0 if one_each and self.can_split_keys(q.device) else 1,  # 0: fill the GPU
            **ragged,
        )
        return out.squeeze(1) if one_each else out


def _import_flash4() -> Callable[..., tuple[Tensor, Tensor | None]] | str:
    os.environ.setdefault(_CACHE_VARIABLE, "1")
    module = import_library("flash_attn.cute", "flash-attn 4", INSTALL)
    return module if isinstance(module, str) else cast(Callable[..., Any], module.flash_attn_varlen_func)
