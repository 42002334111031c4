"""The backend on PyTorch's own build of flash-attn 2, torch.nn.attention.varlen: what serves where flash-attn is not
installed. It takes block tables from torch 2.13 on, and has no softcap."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Softmax
from quire.kernels.gpu.paged import FlashPages

_NO_SOFTCAP = "PyTorch's varlen attention has no softcap; install flash-attn (pip install 'quire[flash]')"


class TorchVarlen(FlashPages):
    name = "torch_varlen"

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        self._attend = _varlen_attn()

    def description(self) -> str:
        return f"flash-attn as built into PyTorch {torch.__version__}"

    def cannot_serve(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False
    ) -> str | None:
        if self._attend is None:
            return f"PyTorch {torch.__version__} has no paged attention, 2.13 has"
        return super().cannot_serve(device, dtype, head_dim, softcap) or (_NO_SOFTCAP if softcap else None)

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
    ) -> Tensor:
        """Raises NotImplementedError for a softcap.

        Keys are never split among thread blocks: paged and split, PyTorch leaves rows unwritten
        (https://github.com/pytorch/pytorch/issues/194167). So no result depends on the batch, deterministic or not.
        """
        if softmax.softcap is not None:
            raise NotImplementedError(_NO_SOFTCAP)
        assert self._attend is not None
        return self._attend(
            q,
            k_cache,
            v_cache,
            metadata.query_start,
            metadata.key_start,
            metadata.max_query_len,
            metadata.max_context_len,
            scale=softmax.scale,
            # (left, right): -1 is unlimited, and a window counts the query itself, PyTorch the keys to its left.
            window_size=(-1 if softmax.window is None else softmax.window - 1, 0),
            enable_gqa=q.shape[1] != k_cache.shape[2],
            seqused_k=metadata.context_lens,
            block_table=metadata.block_table,
            num_splits=1,
        )


def _varlen_attn() -> Callable[..., Tensor] | None:
    """PyTorch's function, if it takes block tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    paged = "block_table" in inspect.signature(varlen_attn).parameters
    return cast(Callable[..., Tensor], varlen_attn) if paged else None
