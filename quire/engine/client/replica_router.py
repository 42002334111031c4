"""Decides which replica computes a request. The router does not ask replicas what they have cached, but infers it from
what it lately sent them. Prompts are hashed as in engine/core/kv_cache/block_pool.py. No clock, no input, no output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.kv_cache.block_pool import block_hash, media_extra_keys, root_hash

PIECE = 16
"""Tokens per hash."""
MOST_PIECES = 2**16
"""Pieces remembered per replica: a million tokens, in some 10 MB."""
MOST_AHEAD = 32
"""A replica gets no request, however long its cached prefix, while it has this many more open ones than the least busy.
"""


def prefix_pieces(request: EngineCoreRequest) -> list[bytes]:
    """Hashes of a prompt's full pieces, each covering all tokens before its end. Prompts with different salts or
    adapters share none.
    """
    ids = request.prompt_ids
    parent, hashes = root_hash(request.cache_salt, "" if request.adapter is None else request.adapter.digest), []
    for end in range(PIECE, len(ids) + 1, PIECE):
        contents = media_extra_keys(request.spans, end - PIECE, end)
        parent = block_hash(parent, ids[end - PIECE : end], contents)
        hashes.append(parent)
    return hashes


class Router:
    """Must learn of each request's end, and of each replica that loses its cache."""

    def __init__(self, count: int, most_pieces: int = MOST_PIECES) -> None:
        self.open = [0] * count
        """Open requests by replica, numbered from 0."""
        self._most = most_pieces
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]
        """Per replica, the pieces it should have cached, the most recently used last. A piece is there only with all
        pieces before it in its prompt.
        """

    def place(self, pieces: Sequence[bytes], among: Iterable[int]) -> int:
        """Choose one of these replicas for a request with this prefix, and count the request as open there.

        A request in the batch costs about as much as computing a piece. So the longest cached prefix wins, unless its
        replica's lead in open requests over the least loaded one exceeds its lead in cached pieces, or MOST_AHEAD.
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
        self.open[replica] -= 1
        assert self.open[replica] >= 0

    def forget(self, replica: int) -> None:
        """The replica's cache is empty now. Its open requests stay open."""
        self._sent[replica].clear()

    def cached(self, replica: int, pieces: Iterable[bytes]) -> int:
        """Number of leading pieces that the replica should have."""
        sent, count = self._sent[replica], 0
        for piece in pieces:
            if piece not in sent:
                break
            count += 1
        return count

    def _remember(self, replica: int, pieces: Sequence[bytes]) -> None:
        sent = self._sent[replica]
        for piece in reversed(pieces):  # a prompt's end is evicted before its beginning
            sent[piece] = None
            sent.move_to_end(piece)
        while len(sent) > self._most:
            sent.popitem(last=False)
