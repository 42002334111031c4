"""Keys and values of all heads, made of latents: fewer products than in the absorbed form where a prompt is long, but
rounded otherwise, so only where a row's bits may depend on how its prompt was cut."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.backend import AttentionMetadata, Operations
from quire.kernels.softmax import Softmax


def expanded_attention(
    run: Operations,
    q: Tensor,
    halves: tuple[Tensor, Tensor],
    cache: Tensor,
    metadata: AttentionMetadata,
    softmax: Softmax,
) -> Tensor:
    """What attention gives, [T, H * V], for the turned queries [T, H, P + R] of whole prompts. halves: of kv_b_proj,
    [H, L, P], which brings queries into the space of latents, and [H, V, L], which makes values; V is at most P + R.
    cache [P, page size, 1, L + R] has all latents of these tokens. Attention is that of H heads, each key and value
    being a page."""
    (tokens, heads, width), (absorb, expand) = q.shape, halves
    values, size = expand.shape[1:]
    low, turned = cache.view(-1, cache.shape[-1])[metadata.slots].split((size, cache.shape[-1] - size), dim=1)
    plain = torch.matmul(low, absorb).transpose(0, 1)
    k = torch.cat((plain, turned[:, None].expand(-1, heads, -1)), dim=2)
    v = F.pad(torch.matmul(low, expand.transpose(1, 2)).transpose(0, 1), (0, width - values))
    behind = torch.arange(metadata.max_context_len, dtype=torch.int32, device=q.device)
    table = (metadata.query_start[:-1, None] + behind).clamp_(max=tokens - 1)
    there = replace(metadata, block_table=table, parts=(), others=())
    found = run.paged_attention(q, k[:, None], v[:, None].contiguous(), there, replace(softmax, values=None))
    return found[..., :values].flatten(1)
