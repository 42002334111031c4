"""The backend on flash-attn 2 (Dao, 2023): https://github.com/Dao-AILab/flash-attention, `pip install quire[flash]`."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Softmax
from quire.kernels.gpu.paged import FlashPages


class Flash(FlashPages):
    name = "flash"
    _library: ModuleType
    """flash_attn; not there where something is missing."""

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        found = _load()
        self._missing = found if isinstance(found, str) else None
        if not isinstance(found, str):
            self._library = found

    def description(self) -> str:
        return f"flash-attn {self._library.__version__}"

    def cannot_serve(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        return super().cannot_serve(device, dtype, head_dim, softcap) or self._missing

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
    ) -> Tensor:
        """One query per sequence goes to the split-KV decode kernel, everything else to the ragged one.

        The decode kernel cuts a sequence's keys into as many parts as fill the GPU; a deterministic backend allows one
        part. Keys are then always reduced in the same order: both functions run the same kernel, over tiles aligned to
        position 0.
        """
        asked = {
            "softmax_scale": softmax.scale,
            "causal": True,
            # (left, right): a window counts the query itself; flash-attn counts the keys to its left, -1 is unlimited.
            "window_size": (-1, -1) if softmax.window is None else (softmax.window - 1, 0),
            "softcap": softmax.softcap or 0.0,
            "block_table": metadata.block_table,
        }
        if metadata.max_query_len == 1:
            lengths = {"cache_seqlens": metadata.context_lens, "num_splits": 1 if self.deterministic else 0}
            out: Tensor = self._library.flash_attn_with_kvcache(q.unsqueeze(1), k_cache, v_cache, **lengths, **asked)
            return out.squeeze(1)
        out = self._library.flash_attn_varlen_func(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=metadata.query_start,
            cu_seqlens_k=metadata.key_start,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_context_len,
            **asked,
        )
        return out


def _load() -> ModuleType | str:
    """The library, or why it cannot be used."""
    try:
        import flash_attn
    except ModuleNotFoundError:
        return "flash-attn is not installed (pip install 'quire[flash]')"
    except ImportError as error:  # built for another PyTorch or CUDA
        return f"flash-attn cannot be loaded, reinstall it for this PyTorch ({str(error).splitlines()[0]})"
    module: ModuleType = flash_attn
    return module
