"""Decides which replica computes a request. The router does not ask replicas what they have cached, but infers it from
what it lately sent them. Prompts are hashed as in engine/core/kv_cache/block_pool.py. No clock, no input, no output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from quire.engine.common.types import EngineCoreRequest
from quire.engine.core.request import block_hash, media_extra_keys, root_hash

PIECE = 16
MOST_PIECES = 2**16
"""Pieces remembered per replica: a million tokens in about 10 MB."""
MOST_AHEAD = 32
"""A replica with this many more open requests than the least busy one gets none."""


def prefix_pieces(request: EngineCoreRequest) -> list[bytes]:
    """Each hash covers all tokens before its end, the salt and the adapter."""
    ids = request.prompt_ids
    parent, hashes = root_hash(request.cache_salt, "" if request.adapter is None else request.adapter.digest), []
    for end in range(PIECE, len(ids) + 1, PIECE):
        contents = media_extra_keys(request.spans, end - PIECE, end)
        parent = block_hash(parent, ids[end - PIECE : end], contents)
        hashes.append(parent)
    return hashes


class Router:
    """Callers must report when requests end and replicas lose their cache."""

    def __init__(self, count: int, most_pieces: int = MOST_PIECES) -> None:
        self.open = [0] * count
        """Open requests by replica, numbered from 0."""
        self._most = most_pieces
        self._sent: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(count)]
        """Pieces that each replica should have cached, the last used last. A piece is there only with all earlier ones
        of its prompt.
        """

    def place(self, pieces: Sequence[bytes], among: Iterable[int]) -> int:
        """Counts the request as open at its replica. The longest cached prefix wins, unless its replica's excess of
        open requests over the least loaded one exceeds its excess of cached pieces, or MOST_AHEAD: a request in the
        batch costs about as much as computing a piece.
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
        for piece in reversed(pieces):  # a prompt's end is evicted before its beginning
            sent[piece] = None
            sent.move_to_end(piece)
        while len(sent) > self._most:
            sent.popitem(last=False)
