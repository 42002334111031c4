"""Which pages hold a sequence's first tokens already, and which hashes its own pages are found by."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from quire.engine.core.batch import PageCopy
from quire.engine.core.blocks import GONE, group_key
from quire.engine.core.page_tables import PageTables, held
from quire.engine.core.sequence import Sequence
from quire.engine.core.sessions import Sessions
from quire.engine.core.state_snapshots import NoSnapshots
from quire.engine.core.stats import Counts


class PrefixCache:
    """The pool's pages by the tokens in them. Where pages are large, the beginning of one may be shared by a copy."""

    def __init__(
        self, tables: PageTables, piece: int, counts: Counts, *, enabled: bool, snapshots: NoSnapshots | None = None
    ) -> None:
        """`piece`: tokens that are hashed together; a divisor of a page's tokens. Not `enabled`: nothing is found.
        `snapshots`: what a sequence must find beside pages; by default nothing."""
        self.block_size = block_size = tables.needs.block_size
        assert block_size % piece == 0
        self.enabled = enabled
        self.snapshots = snapshots or NoSnapshots()
        self._sessions = Sessions(tables.pool, snapshots=self.snapshots, counts=counts)
        self._counts = counts
        self._tables = tables
        self._pool = tables.pool
        self._groups = tables.groups
        self._piece = piece
        self._pieces = block_size // piece
        self._written: dict[int, int] = {}
        """For each page that the step being decided will write to, the first of its tokens that is written."""

    @property
    def unit(self) -> int:
        """Tokens in multiples of which a prefix is found; 0: none is."""
        return max(self._piece, self.snapshots.every) if self.enabled else 0

    def begin_step(self) -> None:
        self._written.clear()
        self._sessions.begin_step()
        self.snapshots.begin_step()

    def piece_digests(self, seq: Sequence) -> list[SequenceOf[bytes]]:
        """For each full page of a sequence's tokens but the last, which must be computed, the hashes of its pieces: the
        last one is the page's own."""
        if not self.enabled or seq.needs_every_token:
            return []
        digests = seq.digests((len(seq.tokens) - 1) // self._piece, self._piece)
        return [digests[end - self._pieces : end] for end in range(self._pieces, len(digests) + 1, self._pieces)]

    def cached(self, seq: Sequence) -> list[int]:
        """Cached pages of a waiting sequence's tokens but the last, as PageTables.find gives them."""
        digests = [pieces[-1] for pieces in self.piece_digests(seq)]
        pages = self._tables.find(digests)
        usable = self.snapshots.usable(digests[: len(pages) // self._groups])
        return pages if usable * self._groups == len(pages) else self._tables.find(digests[:usable])

    def share(self, seq: Sequence, cached: list[int]) -> None:
        """Let a sequence without pages, which has a slot, begin with these."""
        self._tables.begin(seq, cached)
        seq.known_pieces = len(cached) // self._groups * self._pieces
        self.snapshots.begin(seq)

    def count(self, seq: Sequence) -> None:
        """Count what was found for a sequence that begins, when it does so for the first time."""
        if seq.cached_tokens is None:
            seq.cached_tokens = min(seq.computed, seq.num_prompt)
            self._counts.prefix_queries += seq.num_prompt
            self._counts.prefix_hits += seq.cached_tokens
            if self.enabled and seq.request.sampling is not None:
                self._sessions.began(seq, seq.digests(len(seq.tokens) // self._piece, self._piece))

    def leave(self, seq: Sequence) -> None:
        """Take back all pages of a sequence; some are kept for the next turn of its conversation."""
        if self.enabled and seq.request.sampling is not None:
            pages = held(seq.blocks[: seq.known_pieces // self._pieces * self._groups])
            digests = seq.digests(seq.known_pieces, self._piece)
            self._sessions.left(seq, [page for page in pages if page in self._pool.cached], digests)
        self._tables.release(seq)

    def forget(self) -> None:
        """Let nothing be found that was computed before."""
        self._sessions.forget()
        self._pool.forget()
        self.snapshots.forget()

    def fork(self, seq: Sequence) -> list[PageCopy]:
        """Where a cached page of each group begins as the sequence's next one does, give the sequence pages with copies
        of that beginning.

        Copies are made before the step computes anything, so what it will write itself cannot be copied.
        """
        if self._pieces == 1 or not self.enabled or seq.needs_every_token:
            return []
        first = len(seq.blocks) // self._groups * self._pieces
        digests = seq.digests((len(seq.tokens) - 1) // self._piece, self._piece)[first : first + self._pieces - 1]
        for count in range(len(digests), 0, -1):
            found = self._beginnings(digests[count - 1], count * self._piece)
            if len(found) == self._groups:
                # If nobody holds a page that was found, it may be among those allocated. Then its group goes on in it,
                # there is nothing to copy, and no other copy overwrites it.
                new = self._pool.allocate(self._groups)
                others = iter([page for page in new if page not in found])
                pages = [page if page in new else next(others) for page in found]
                seq.blocks += pages
                seq.computed += count * self._piece
                pairs = zip(found, pages, strict=True)
                return [PageCopy(*pair, count * self._piece) for pair in pairs if pair[0] != pair[1]]
        return []

    def _beginnings(self, digest: bytes, tokens: int) -> list[int]:
        """The page of each group whose first tokens have this hash, where the page held them before this step: copies
        are made first."""
        found = [self._pool.find(group_key(digest, group)) for group in range(self._groups)]
        return [page for page in found if page is not None and tokens <= self._written.get(page, self.block_size)]

    def register(self, seq: Sequence, start: int, known: int) -> None:
        """Let the pieces that are full now be found, and note what the step writes, from token `start` on; it computes
        the first `known` tokens, and guesses behind them."""
        if not self.enabled or seq.computed == start:
            return
        self.snapshots.keep(seq, known)
        full = min(seq.computed, len(seq.tokens)) // self._piece
        if full > seq.known_pieces:
            for index, digest in enumerate(seq.digests(full, self._piece)[seq.known_pieces :], seq.known_pieces):
                first = index // self._pieces * self._groups
                for group, page in enumerate(seq.blocks[first : first + self._groups]):
                    if page != GONE:
                        self._pool.register(page, group_key(digest, group))
            seq.known_pieces = full
        if self._pieces > 1:  # what is written matters to forks alone
            for index in range(start // self.block_size, -(-seq.computed // self.block_size)):
                for page in seq.blocks[index * self._groups : (index + 1) * self._groups]:
                    self._written[page] = max(start - index * self.block_size, 0)

    def full_pages(self, seq: Sequence) -> list[tuple[int, bytes]]:
        """A sequence's pages that can be found, each with its own hash. Only where all layers are one group."""
        assert self._groups == 1
        count = seq.known_pieces // self._pieces
        digests = seq.digests(count * self._pieces, self._piece)[self._pieces - 1 :: self._pieces]
        return [(page, digest) for page, digest in zip(seq.blocks, digests, strict=False) if self._pool.knows(digest)]
