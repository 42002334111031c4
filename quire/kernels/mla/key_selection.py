"""Chooses the keys of sparse attention in PyTorch. KeySelectionParams has the formula."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_KEY_TILE = 128
_QUERY_TILE = 16
"""With these tiles, all products have one shape, so that a row's sums do not depend on the batch."""


def select_top_keys(q: Tensor, keys: Tensor, weights: Tensor, positions: Tensor, top_k: int) -> Tensor:
    """Return [T, top_k] int32 as `Operations.select_keys` does, for q [T, H, D] and weights [T, H] of one sequence's
    tokens, and the sequence's keys [N, D].
    """
    selected = torch.full((len(q), top_k), -1, dtype=torch.int32, device=q.device)
    for begin in range(0, len(q), _QUERY_TILE):
        rows = slice(begin, begin + _QUERY_TILE)
        scores = _score_keys(q[rows], keys, weights[rows])
        for row, position in enumerate(positions[rows].tolist()):
            seen = scores[row, : position + 1].nan_to_num(-torch.inf, torch.inf, -torch.inf)
            best = seen.sort(descending=True, stable=True).indices[:top_k].sort().values
            selected[begin + row, : len(best)] = best.to(torch.int32)
    return selected


def _score_keys(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Return scores [rows, N] of at most _QUERY_TILE rows, in float64 if q is float64, otherwise in float32."""
    rows, heads, dim = q.shape
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries = F.pad(q.to(compute), (0, 0, 0, 0, 0, _QUERY_TILE - rows)).view(-1, dim)
    factors = F.pad(weights.to(compute), (0, 0, 0, _QUERY_TILE - rows))[:, :, None]
    padded = F.pad(keys.to(compute), (0, 0, 0, -len(keys) % _KEY_TILE))
    tiles = [
        (torch.mm(queries, tile.t()).relu().view(_QUERY_TILE, heads, -1) * factors).sum(1)
        for tile in padded.split(_KEY_TILE)
    ]
    return torch.cat(tiles, dim=1)[:rows, : len(keys)]
