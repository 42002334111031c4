"""flash-attn 3 (Shah et al., 2024) for Hopper: package flash_attn_3, with wheels built by PyTorch. Written against
flash_attn_interface.py and flash_api.cpp of August 2026.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.libraries.flash_backend import FlashLibraryBackend, import_library

INSTALL = "pip install flash-attn-3, from PyTorch's index for your CUDA"


class Flash3Backend(FlashLibraryBackend):
    name = "flash3"
    package = "flash_attn_3"
    compute_majors = (9,)
    batch_variance_reason = "its tiles depend on the number of queries"

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(_import_flash3(), deterministic=deterministic)

    def attend_batch_part(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        """flash-attn chooses the number of splits on the host by the block table's width. A CUDA graph keeps the number
        for its longest context.
        """
        window = softmax.window_if_limiting(metadata.max_context_len)
        one_each = metadata.max_query_len == 1
        ragged = {} if one_each else {"cu_seqlens_q": metadata.query_start, "max_seqlen_q": metadata.max_query_len}
        out: Tensor = self._library.flash_attn_with_kvcache(
            q.unsqueeze(1) if one_each else q,
            k_cache,
            v_cache,
            cache_seqlens=metadata.context_lens,
            page_table=metadata.block_table,
            softmax_scale=softmax.scale,
            causal=True,
            # (left, right); -1 is unlimited; our window includes the query, left does not
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softmax.softcap or 0.0,
            num_splits=0 if one_each else 1,
            **ragged,
        )
        return out.squeeze(1) if one_each else out


def _import_flash3() -> ModuleType | str:
    return import_library("flash_attn_interface", "flash-attn 3", INSTALL)
