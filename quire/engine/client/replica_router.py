"""Decides which replica computes a request. The router does not ask replicas what they have cached, but infers it from
what it recently sent them. Prompts are hashed as in engine/core/kv_cache/block_pool.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.request import block_hash, media_extra_keys, root_hash

PIECE = 16
MOST_PIECES = 2**16
"""Pieces (of PIECE tokens) remembered for each replica: a million tokens in about 10 MB."""
MOST_AHEAD = 32
"""A replica whose open requests exceed those of the least busy replica by more than this gets no request."""


def prefix_pieces(request: EngineCoreRequest) -> list[bytes]:
    """Hashes of a prompt's pieces. Each covers the salt, the adapter and all tokens up to the piece's end."""
    ids = request.prompt_ids
    parent, hashes = root_hash(request.cache_salt, "" if request.adapter is None else request.adapter.digest), []
    for end in range(PIECE, len(ids) + 1, PIECE):
        contents = media_extra_keys(request.spans, end - PIECE, end)
        parent = block_hash(parent, ids[end - PIECE : end], contents)
        hashes.append(parent)
    return hashes


class Router:
    """Callers must report when a request ends and when a replica loses its cache."""

    def __init__(self, count: int, most_pieces: int = MOST_PIECES) -> None:
        self.open = [0] * count
        """Number of open requests, indexed by replica."""
        self._most = most_pieces
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]
        """Hashes of the pieces that each replica should have cached, least recently used first. A piece is present only
        with all earlier pieces of its prompt.
        """

    def place(self, pieces: Sequence[bytes], among: Iterable[int]) -> int:
        """The replica with the longest cached prefix is chosen, unless it has more open requests than the least loaded
        replica, by more than MOST_AHEAD or than the pieces that its cache saves. Then the least loaded one is chosen.
        Requests and pieces are comparable, because a request in the batch costs about as much as computing a piece.
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
        sent, count = self._sent[replica], 0
        for piece in pieces:
            if piece not in sent:
                break
            count += 1
        return count

    def _remember(self, replica: int, pieces: Sequence[bytes]) -> None:
        sent = self._sent[replica]
        for piece in reversed(pieces):  # the replica evicts a prompt's end before its beginning
            sent[piece] = None
            sent.move_to_end(piece)
        while len(sent) > self._most:
            sent.popitem(last=False)
