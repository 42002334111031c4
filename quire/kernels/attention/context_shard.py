"""Which tokens of every sequence a rank keeps, where ranks divide them (decode context parallelism)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextShard:
    """A page has `tokens_per_page` tokens of each rank, in the order of the ranks; `tokens_per_page` is what a cache
    has of a page. So a rank's tokens, counted by themselves, lie in pages of `tokens_per_page` that the same block
    table names."""

    rank: int
    world_size: int
    tokens_per_page: int
    remote_slot: int = -1
    """AttentionMetadata.slot_mapping of tokens that others keep."""

    @property
    def token_range_in_page(self) -> range:
        """This rank's tokens of a page."""
        return range(self.tokens_per_page * self.rank, self.tokens_per_page * (self.rank + 1))

    def num_local_tokens_before(self, position: int) -> int:
        """How many of the tokens before a position are this rank's."""
        pages, rest = divmod(position, self.tokens_per_page * self.world_size)
        return pages * self.tokens_per_page + min(max(rest - self.rank * self.tokens_per_page, 0), self.tokens_per_page)

    def max_tokens_per_rank(self, context_len: int) -> int:
        """The most tokens that any rank keeps of a context, in whole tiles."""
        return -(-context_len // (self.tokens_per_page * self.world_size)) * self.tokens_per_page

    def global_positions(self, local_indices: Tensor) -> Tensor:
        """The positions in the sequence of this rank's tokens, by their numbers among these."""
        span = self.tokens_per_page * self.world_size
        return (
            local_indices // self.tokens_per_page * span
            + self.rank * self.tokens_per_page
            + local_indices % self.tokens_per_page
        )

    def slot_mapping(self, pages: Tensor, positions: Tensor) -> Tensor:
        """AttentionMetadata.slot_mapping of tokens at these positions, in these pages [.., T] int64. It makes no host
        wait."""
        places = positions % (self.tokens_per_page * self.world_size) - self.rank * self.tokens_per_page
        stored = pages * self.tokens_per_page + places
        return (
            stored
            if self.world_size == 1
            else torch.where(places // self.tokens_per_page == 0, stored, self.remote_slot)
        )


def single_shard(tokens_per_page: int) -> ContextShard:
    """Of one process, whose pages have so many tokens."""
    return ContextShard(0, 1, tokens_per_page)
