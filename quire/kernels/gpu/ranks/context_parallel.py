from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.attention.context_shard import ContextShard
from quire.kernels.gpu.triton_attention import merge_ranks
from quire.kernels.gpu.triton_launch_sizes import next_power_of_2


def allocate_attention_output(q: Tensor, values: int, shard: ContextShard | None) -> Tensor:
    """q is [T, H, any]. With a shard, the tensor is for a packed partial softmax."""
    if shard is None:
        return q.new_empty((*q.shape[:2], values))
    return q.new_empty((*q.shape[:2], values + 2), dtype=torch.float32)


def merge_rank_outputs(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Like `merge_shard_attention` (kernels/attention/reference_attention.py), in a batch-invariant kernel."""
    ranks, tokens, heads, width = parts.shape
    out = parts.new_empty((tokens, heads, width - 2), dtype=dtype)
    sizes = (heads, width - 2, next_power_of_2(width - 2), ranks, sinks is not None)
    rows = tokens * heads
    merge_ranks[rows,](out, parts if sinks is None else sinks, parts.contiguous(), rows, *sizes, num_warps=1)
    return out
