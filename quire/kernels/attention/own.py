"""Which tokens of every sequence a rank keeps, where ranks divide them (decode context parallelism)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Own:
    """A page has `tile` tokens of each rank, in the order of the ranks; `tile` is what a cache has of a page. So a
    rank's tokens, counted by themselves, lie in pages of `tile` that the same block table names."""

    rank: int
    count: int
    tile: int
    elsewhere: int = -1
    """AttentionMetadata.slots of tokens that others keep."""

    @property
    def of_page(self) -> range:
        """This rank's tokens of a page."""
        return range(self.tile * self.rank, self.tile * (self.rank + 1))

    def before(self, position: int) -> int:
        """How many of the tokens before a position are this rank's."""
        pages, rest = divmod(position, self.tile * self.count)
        return pages * self.tile + min(max(rest - self.rank * self.tile, 0), self.tile)

    def most(self, context: int) -> int:
        """The most tokens that any rank keeps of a context, in whole tiles."""
        return -(-context // (self.tile * self.count)) * self.tile

    def positions(self, places: Tensor) -> Tensor:
        """The positions in the sequence of this rank's tokens, by their numbers among these."""
        span = self.tile * self.count
        return places // self.tile * span + self.rank * self.tile + places % self.tile

    def slots(self, pages: Tensor, positions: Tensor) -> Tensor:
        """AttentionMetadata.slots of tokens at these positions, in these pages [.., T] int64. It makes no host wait."""
        places = positions % (self.tile * self.count) - self.rank * self.tile
        stored = pages * self.tile + places
        return stored if self.count == 1 else torch.where(places // self.tile == 0, stored, self.elsewhere)


def whole(tile: int) -> Own:
    """Of one process, whose pages have so many tokens."""
    return Own(0, 1, tile)
