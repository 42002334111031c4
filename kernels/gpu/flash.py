"""The backend on flash-attn 2 (Dao, 2023): https://github.com/Dao-AILab/flash-attention, `pip install quire[flash]`.

Signatures and shapes are documented in kernels/backend.py.
"""

from __future__ import annotations

from functools import cache, partial
from types import ModuleType

import torch
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Softmax
from quire.kernels.gpu.paged import *  # noqa: F403 - every function of a backend beside attention
from quire.kernels.gpu.paged import flash_cannot_serve

NAME = "flash"


@cache
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


def _library() -> ModuleType:
    found = _load()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def description() -> str:
    return f"flash-attn {_library().__version__}"


def cannot_serve(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: bool = False) -> str | None:
    found = _load()
    return flash_cannot_serve(device, dtype, head_dim) or (found if isinstance(found, str) else None)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, softmax: Softmax, num_splits: int = 0
) -> Tensor:
    """One query per sequence goes to the split-KV decode kernel, everything else to the ragged one.

    num_splits: into how many parts a decode cuts a sequence's keys, 0: as many as fill the GPU. With 1, keys are always
    reduced in the same order: both functions then run the same kernel, over tiles aligned to position 0.
    """
    flash_attn = _library()
    asked = {
        "softmax_scale": softmax.scale,
        "causal": True,
        # (left, right): a window counts the query itself; flash-attn counts the keys to its left, -1 is unlimited.
        "window_size": (-1, -1) if softmax.window is None else (softmax.window - 1, 0),
        "softcap": softmax.softcap or 0.0,
        "block_table": metadata.block_table,
    }
    if metadata.max_query_len == 1:
        lengths = {"cache_seqlens": metadata.context_lens, "num_splits": num_splits}
        out: Tensor = flash_attn.flash_attn_with_kvcache(q.unsqueeze(1), k_cache, v_cache, **lengths, **asked)
        return out.squeeze(1)
    out = flash_attn.flash_attn_varlen_func(
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


deterministic_attention = partial(paged_attention, num_splits=1)
"""What --deterministic uses."""
