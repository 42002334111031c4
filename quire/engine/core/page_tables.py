"""The pages of running sequences: a table for each group of layers, of which those with a window give back what no
token to come sees."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from quire.engine.checkpoint.page_groups import PageNeeds
from quire.engine.core.blocks import GONE, BlockPool, group_key
from quire.engine.core.sequence import Sequence


class PageTables:
    """A sequence's `blocks` are the pages of its first block_size tokens, a page for each group, then those of the next
    ones. All groups grow together; a page that a group has given back leaves GONE in its place."""

    def __init__(self, pool: BlockPool, needs: PageNeeds) -> None:
        self.pool = pool
        self.needs = needs
        self.groups = len(needs.windows)
        self.saved = 0
        """Pages that the sequences would hold besides, were there no windows."""
        self._block_size = needs.block_size
        self._whole = [group for group, window in enumerate(needs.windows) if window is None]
        self.windowed = [(group, window) for group, window in enumerate(needs.windows) if window is not None]
        """Groups with a window, and it: none where `trim` has nothing to do."""

    @property
    def holds(self) -> int:
        """Tokens for which the pool has pages, were they one sequence's and no group had a window."""
        return self.pool.num_blocks // self.groups * self._block_size

    def missing(self, seq: Sequence, tokens: int) -> int:
        """Pages that a sequence lacks for its first `tokens` tokens; negative where it has more."""
        return self.groups * -(-tokens // self._block_size) - len(seq.blocks)

    def grow(self, seq: Sequence, tokens: int) -> None:
        """Give a sequence pages for its first `tokens` tokens. The caller has checked that there are enough."""
        if (count := self.missing(seq, tokens)) > 0:
            seq.blocks += self.pool.allocate(count)

    def needed(self, seq: Sequence, cached: SequenceOf[int]) -> int:
        """How many free pages a waiting sequence needs until all its tokens are computed, where it begins with pages
        that `find` gave. Some of these it gives back on its way."""
        tokens = len(seq.tokens)
        beside = self.needs.most(tokens, len(cached) // self.groups) + self.pool.idle(held(cached))
        return min(beside, self.needs.most(tokens))

    def room(self, seq: Sequence) -> int:
        """Tokens for which a sequence and the pool have pages."""
        return (len(seq.blocks) + self.pool.num_free) // self.groups * self._block_size

    def own(self, seq: Sequence) -> int:
        """Pages that are free when this sequence alone gives its pages back."""
        return sum(self.pool.references[page] == 1 for page in held(seq.blocks))

    def trim(self, seq: Sequence) -> None:
        """Take back the pages that neither a sequence's next token sees nor one after it.

        A step that is under way may still read them: whoever gets them writes in a later step, or in layers that have
        read already. Drafts that turn out wrong do not lead back before the first token of the step that computed them.
        """
        for group, window in self.windowed:
            first, last = (self.needs.first_seen(window, at) for at in (seq.trimmed, seq.computed))
            if first < last:
                places = slice(first * self.groups + group, last * self.groups, self.groups)
                self.pool.release(seq.blocks[places])
                seq.blocks[places] = [GONE] * (last - first)
                self.saved += last - first
        seq.trimmed = seq.computed

    def begin(self, seq: Sequence, cached: SequenceOf[int]) -> None:
        """Let a sequence without pages begin with these, which `find` gave."""
        self.pool.share(held(cached))
        seq.blocks = list(cached)
        seq.computed = seq.trimmed = len(cached) // self.groups * self._block_size
        self.saved += cached.count(GONE)

    def release(self, seq: Sequence) -> None:
        """Take back all pages of a sequence."""
        self.saved -= seq.blocks.count(GONE)
        self.pool.release(held(seq.blocks))
        seq.blocks = []

    def find(self, digests: SequenceOf[bytes]) -> list[int]:
        """Pages of the longest prefix of the blocks with these hashes after which a sequence can go on: of groups with
        a window, those that the next token sees; the others are GONE."""
        tables: list[list[int]] = [[] for _ in self.needs.windows]
        for group in self._whole:
            tables[group] = self.pool.lookup(group_key(digest, group) for digest in digests)
            digests = digests[: len(tables[group])]
        shortened = bool(self.windowed)
        while shortened:
            before = len(digests)
            for group, window in self.windowed:
                tables[group] = self._find_seen(digests, group, window)
                digests = digests[: len(tables[group])]
            shortened = len(digests) < before
        if self.groups == 1:
            return tables[0]
        return [page for row in zip(*(table[: len(digests)] for table in tables), strict=True) for page in row]

    def _find_seen(self, digests: SequenceOf[bytes], group: int, window: int) -> list[int]:
        """The same for one group: it goes back from the end, and where a page is missing that would be seen, the prefix
        ends before it."""
        count, pages = len(digests), [GONE] * len(digests)
        index = count - 1
        while index >= self.needs.first_seen(window, count * self._block_size):
            page = self.pool.find(group_key(digests[index], group))
            if page is None:
                count = index
            else:
                pages[index] = page
            index -= 1
        return pages[:count]


def held(pages: Iterable[int]) -> list[int]:
    return [page for page in pages if page != GONE]
