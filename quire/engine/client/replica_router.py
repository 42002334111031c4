"""Decides which replica computes a request: the one that has the longest part of its prompt in its prefix cache, unless
that one has too much to do; then the one that has the least.

A replica is not asked what it has cached: that is taken to be what was sent to it lately. As in the engines
(engine/core/block_pool.py), prompts are hashed piece by piece, and each hash stands for all tokens up to its piece's
end.
There is no clock, no input and no output here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.block_pool import block_hash, media_extra_keys, root_hash

PIECE = 16
"""Tokens that are hashed together."""
MOST_PIECES = 2**16
"""Pieces that are remembered of a replica: a million tokens, in some 10 MB."""
MOST_AHEAD = 32
"""However long its cached prefix is, no replica gets a request while it has more open ones than this above the one that
has the fewest."""


def prefix_pieces(request: EngineCoreRequest) -> list[bytes]:
    """The hashes of a prompt's full pieces, each of all tokens before its end. Prompts of different salts, or for
    different adapters, have none in common."""
    ids = request.prompt_ids
    parent, hashes = root_hash(request.cache_salt, "" if request.adapter is None else request.adapter.digest), []
    for end in range(PIECE, len(ids) + 1, PIECE):
        contents = media_extra_keys(request.spans, end - PIECE, end)
        parent = block_hash(parent, ids[end - PIECE : end], contents)
        hashes.append(parent)
    return hashes


class Router:
    """Told of each request when it comes and when it ends, and of each replica that loses its cache."""

    def __init__(self, count: int, most_pieces: int = MOST_PIECES) -> None:
        """`count` replicas, numbered from 0."""
        self.open = [0] * count
        """Requests by replica."""
        self._most = most_pieces
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]
        """By replica: pieces that it should have cached, the one that was used last at the end. With a piece all that
        come before it in its prompts are there."""

    def place(self, pieces: Sequence[bytes], among: Iterable[int]) -> int:
        """Choose one of these replicas, at least one, for a request with this prefix, which is then open there.

        A request in the batch costs about what computing a piece does. So the longest cached prefix wins, unless its
        replica has more requests above the least loaded one's than it has cached pieces above that one's, or more than
        MOST_AHEAD.
        """
        loads = [(self.cached(each, pieces), self.open[each], len(self._sent[each]), each) for each in among]
        longest = min(loads, key=lambda one: (-one[0], *one[1:]))
        idlest = min(loads, key=lambda one: (one[1], -one[0], *one[2:]))
        saved, ahead = longest[0] - idlest[0], longest[1] - idlest[1]
        chosen = (longest if ahead <= min(saved, MOST_AHEAD) else idlest)[-1]
        self.open[chosen] += 1
        self._remember(chosen, pieces)
        return chosen

    def record_request_end(self, replica: int) -> None:
        """A request of this replica has ended."""
        self.open[replica] -= 1
        assert self.open[replica] >= 0

    def forget(self, replica: int) -> None:
        """Its cache is empty now. Its open requests stay open."""
        self._sent[replica].clear()

    def cached(self, replica: int, pieces: Iterable[bytes]) -> int:
        """How many of a prompt's first pieces it should have."""
        sent, count = self._sent[replica], 0
        for piece in pieces:
            if piece not in sent:
                break
            count += 1
        return count

    def _remember(self, replica: int, pieces: Sequence[bytes]) -> None:
        sent = self._sent[replica]
        for piece in reversed(pieces):  # so that the end of a prompt is forgotten before its beginning
            sent[piece] = None
            sent.move_to_end(piece)
        while len(sent) > self._most:
            sent.popitem(last=False)
