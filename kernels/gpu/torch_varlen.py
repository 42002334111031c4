"""The backend on PyTorch's own build of flash-attn 2, torch.nn.attention.varlen: what serves where flash-attn is not
installed. It takes block tables from torch 2.13 on, and knows no softcap.

Signatures and shapes are documented in kernels/backend.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Softmax
from quire.kernels.gpu.paged import *  # noqa: F403 - every function of a backend beside attention
from quire.kernels.gpu.paged import flash_cannot_serve

NAME = "torch_varlen"
_NO_SOFTCAP = "PyTorch's varlen attention has no softcap; install flash-attn (pip install 'quire[flash]')"


@cache
def _varlen_attn() -> Callable[..., Tensor] | None:
    """PyTorch's function, if it takes block tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    paged = "block_table" in inspect.signature(varlen_attn).parameters
    return cast(Callable[..., Tensor], varlen_attn) if paged else None


def description() -> str:
    return f"flash-attn as built into PyTorch {torch.__version__}"


def cannot_serve(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False) -> str | None:
    if _varlen_attn() is None:
        return f"PyTorch {torch.__version__} has no paged attention, 2.13 has"
    return flash_cannot_serve(device, dtype, head_dim) or (_NO_SOFTCAP if softcap else None)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax
) -> Tensor:
    """Raises NotImplementedError for a softcap.

    Keys are never split among thread blocks: paged and split, PyTorch leaves rows unwritten
    (https://github.com/pytorch/pytorch/issues/194167). It also makes the results independent of the batch.
    """
    if softmax.softcap is not None:
        raise NotImplementedError(_NO_SOFTCAP)
    attend = _varlen_attn()
    assert attend is not None
    return attend(
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
