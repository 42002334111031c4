"""flash-attn 2 (Dao, 2023): https://github.com/Dao-AILab/flash-attention, 2.8 to 2.8.3. Later versions read the longest
context on the host in every paged decode, which CUDA graphs cannot record. INSTALL disables build isolation because the
build imports torch.
"""

from __future__ import annotations

import re
from types import ModuleType

from torch import Tensor

from quire.kernels.attention_params import AttentionParams
from quire.kernels.backend import AttentionMetadata
from quire.kernels.gpu.libraries.flash_backend import FlashLibraryBackend, gather_step_kv, import_library

REQUIREMENT = "flash-attn>=2.8,<2.8.4"
INSTALL = f"pip install --no-build-isolation '{REQUIREMENT}'"
_MIN_VERSION, _FIRST_REFUSED_VERSION = (2, 8), (2, 8, 4)


class Flash2Backend(FlashLibraryBackend):
    name = "flash"

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(_import_flash2(), deterministic=deterministic)

    def description(self) -> str:
        return f"flash-attn {self._library.__version__}"

    def attend_batch_part(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: AttentionParams
    ) -> Tensor:
        """Uses flash_attn_with_kvcache if each sequence has one query, otherwise flash_attn_varlen_func.

        Unless deterministic, full prefills read contiguous copies of the keys and values, which is faster. If
        deterministic, both functions use one split and the same tiles, aligned to position 0, so both reduce the keys
        in the same order.
        """
        window = softmax.window if self.deterministic else softmax.window_if_limiting(metadata.max_context_len)
        options = {
            "softmax_scale": softmax.scale,
            "causal": True,
            # (left, right); -1 is unlimited; our window includes the query, left does not
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": softmax.softcap or 0.0,
        }
        if metadata.max_query_len == 1:
            out: Tensor = self._library.flash_attn_with_kvcache(
                q.unsqueeze(1),
                k_cache,
                v_cache,
                cache_seqlens=metadata.context_lens,
                block_table=metadata.block_table,
                num_splits=1 if self.deterministic else 0,
                **options,
            )
            return out.squeeze(1)
        plain = metadata.is_full_prefill and not self.deterministic
        out = self._library.flash_attn_varlen_func(
            q,
            gather_step_kv(k_cache, metadata) if plain else k_cache,
            gather_step_kv(v_cache, metadata) if plain else v_cache,
            block_table=None if plain else metadata.block_table,
            cu_seqlens_q=metadata.query_start,
            cu_seqlens_k=metadata.key_start,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_context_len,
            **options,
        )
        return out


def _import_flash2() -> ModuleType | str:
    module = import_library("flash_attn", "flash-attn", INSTALL)
    if isinstance(module, str):
        return module
    if not hasattr(module, "flash_attn_with_kvcache"):  # flash-attn 4 shares the namespace package
        return f"the installed package flash_attn is not flash-attn 2 ({INSTALL})"
    return _version_error(module.__version__) or module


def _version_error(version: str) -> str | None:
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if _MIN_VERSION <= numbers < _FIRST_REFUSED_VERSION:
        return None
    return (
        f"flash-attn {version} is not one of 2.8 to 2.8.3, the versions whose paged decodes a CUDA graph can capture "
        f"({INSTALL})"
    )
