from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextShard:
    """The tokens that one rank stores under decode context parallelism. Every rank stores `tokens_per_page` consecutive
    tokens of each block, in rank order.
    """

    rank: int
    world_size: int
    tokens_per_page: int
    remote_slot: int = -1

    @property
    def token_range_in_page(self) -> range:
        return range(self.tokens_per_page * self.rank, self.tokens_per_page * (self.rank + 1))

    def num_local_tokens_before(self, position: int) -> int:
        pages, rest = divmod(position, self.tokens_per_page * self.world_size)
        return pages * self.tokens_per_page + min(max(rest - self.rank * self.tokens_per_page, 0), self.tokens_per_page)

    def max_tokens_per_rank(self, context_len: int) -> int:
        return -(-context_len // (self.tokens_per_page * self.world_size)) * self.tokens_per_page

    def global_positions(self, local_indices: Tensor) -> Tensor:
        span = self.tokens_per_page * self.world_size
        return (
            local_indices // self.tokens_per_page * span
            + self.rank * self.tokens_per_page
            + local_indices % self.tokens_per_page
        )

    def slot_mapping(self, pages: Tensor, positions: Tensor) -> Tensor:
        """Return the slots of `positions` in `pages` [.., T] int64, with `remote_slot` for tokens that other ranks
        store. The host does not wait for the device.
        """
        places = positions % (self.tokens_per_page * self.world_size) - self.rank * self.tokens_per_page
        stored = pages * self.tokens_per_page + places
        return (
            stored
            if self.world_size == 1
            else torch.where(places // self.tokens_per_page == 0, stored, self.remote_slot)
        )


def single_shard(tokens_per_page: int) -> ContextShard:
    return ContextShard(0, 1, tokens_per_page)
