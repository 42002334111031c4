"""The pool of KV pages: ids with reference counts, and which of them hold the KV of which token prefix. No tensors.

A page is found by a hash of the tokens before and in it, so equal prefixes share pages (automatic prefix caching); a
large page also by a hash for each of its pieces, of the tokens up to that piece's end. A page that nobody holds keeps
its content and its hashes until it is allocated again: pages without hashes first, then the least recently freed, and
last those that are kept for somebody (engine/core/sessions.py), as that one gives them up.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b

from quire.engine.types import Span

GONE = -1
"""In a sequence's table: a page that it has given back, for no token to come sees what was in it."""


def root_hash(salt: str, adapter: str = "") -> bytes:
    """The parent of a sequence's first page: prefixes of different salts, or of different adapters, never meet.
    `adapter`: the digest of its content."""
    return blake2b(salt.encode(), digest_size=16, person=bytes.fromhex(adapter)[:16]).digest()


def block_hash(parent: bytes, token_ids: Sequence[int], contents: bytes = b"") -> bytes:
    """16 bytes that stand for these tokens and all before them; `contents`: what `contents_between` says of them."""
    return blake2b(parent + array("q", token_ids).tobytes() + contents, digest_size=16).digest()


def contents_between(spans: Sequence[Span], begin: int, end: int) -> bytes:
    """What the prompt's tokens from `begin` to `end` stand for beside themselves: the contents of the spans that they
    are part of, and where in them they are."""
    found = [span for span in spans if span.start < end and begin < span.start + span.count]
    firsts = ((span.start - span.offset - begin).to_bytes(8, "little", signed=True) for span in found)
    return b"".join(span.digest + first for span, first in zip(found, firsts, strict=True))


def group_key(digest: bytes, group: int) -> bytes:
    """By what a page is found that holds the tokens of a hash in the layers of a group (checkpoint/page_groups.py)."""
    return digest + bytes((group,)) if group else digest


class BlockPool:
    """Hands out page ids 0 to num_blocks - 1. Not thread-safe; one scheduler owns it."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.references = array("i", [0]) * num_blocks
        """How many sequences hold each page; an array of C ints, which NumPy can read (engine/core/snapshot.py)."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._kept: dict[int, int] = {}
        """For each page that is kept, by how many."""
        self._waiting: set[int] = set()
        """Those of them that nobody holds."""
        self.give_up: Callable[[int], None] | None = None
        """Called where so many pages of `_waiting` are needed: unkeeps them, and more at will."""
        self._hashes_of: dict[int, list[bytes]] = {}
        self._block_of: dict[bytes, int] = {}
        self.before_reuse: Callable[[Sequence[int]], None] | None = None
        """Called with pages that are handed out, while they still have the content that they had."""

    @property
    def num_free(self) -> int:
        """Pages that nobody holds, kept or not."""
        return len(self._free) + len(self._waiting)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_unkept(self) -> int:
        """Those of the free pages that are handed out first."""
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Pages that are handed out last."""
        return len(self._kept)

    def keeps(self, block: int) -> bool:
        """Whether a page is kept for somebody."""
        return block in self._kept

    @property
    def cached(self) -> Collection[int]:
        """The pages that can be found by a hash, held or free."""
        return self._hashes_of.keys()

    def allocate(self, count: int) -> list[int]:
        """`count` pages of undefined content, one reference each. The caller has checked num_free."""
        assert count <= self.num_free, "allocation beyond the pool"
        if count > len(self._free):
            assert self.give_up is not None
            self.give_up(count - len(self._free))
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self.references[block] = 1
            blocks.append(block)
        if self.before_reuse is not None:
            self.before_reuse(blocks)
        return blocks

    def knows(self, digest: bytes) -> bool:
        """Whether some page can be found by this hash."""
        return digest in self._block_of

    def find(self, digest: bytes) -> int | None:
        """The page that is found by this hash, if one is. No reference is taken: see `share`."""
        return self._block_of.get(digest)

    def lookup(self, digests: Iterable[bytes]) -> list[int]:
        """Pages of the longest prefix of `digests` that is cached. No reference is taken: see `share`."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these pages nobody holds: sharing them makes num_free smaller by as much."""
        return sum(self.references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Take one more reference of each."""
        for block in blocks:
            if self.references[block] == 0:
                if block in self._kept:
                    self._waiting.remove(block)
                else:
                    del self._free[block]
            self.references[block] += 1

    def keep(self, blocks: Iterable[int]) -> None:
        """Hand these pages, which somebody holds or which can be found, out after all that are not kept."""
        for block in blocks:
            if block not in self._kept and self.references[block] == 0:
                del self._free[block]
                self._waiting.add(block)
            self._kept[block] = self._kept.get(block, 0) + 1

    def unkeep(self, blocks: Iterable[int]) -> None:
        """Take back one `keep` of each. A page that was kept by nobody else is the next to be handed out; of several,
        the last."""
        for block in blocks:
            self._kept[block] -= 1
            if not self._kept[block]:
                del self._kept[block]
                if self.references[block] == 0:
                    self._waiting.remove(block)
                    self._free[block] = None
                    self._free.move_to_end(block, last=False)

    def register(self, block: int, digest: bytes) -> None:
        """Let a page's content up to some token be found by its hash. Where another page has that hash already, lookups
        go on finding that one."""
        assert self.references[block] > 0, "registering a page that nobody holds"
        if digest not in self._block_of:
            self._block_of[digest] = block
            self._hashes_of.setdefault(block, []).append(digest)

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference of each; pages at the end of a prefix are reused before those at its beginning."""
        for block in reversed(blocks):
            self.references[block] -= 1
            assert self.references[block] >= 0, f"page {block} was released twice"
            if self.references[block] == 0 and block in self._kept:
                self._waiting.add(block)
            elif self.references[block] == 0:
                self._free[block] = None
                if block not in self._hashes_of:
                    self._free.move_to_end(block, last=False)

    def drop(self, block: int) -> None:
        """Let a page that nobody holds or keeps be found by no hash, and be handed out first."""
        assert self.references[block] == 0
        assert block not in self._kept
        self._forget(block)
        self._free.move_to_end(block, last=False)

    def forget(self) -> None:
        """Let no page be found by a hash that it has now. Those that are held keep their content."""
        self._hashes_of.clear()
        self._block_of.clear()

    def audit(self) -> None:
        """Assert the invariants that hold between any two calls."""
        for block, count in enumerate(self.references):
            assert (count == 0) == (block in self._free or block in self._waiting)
            assert (block in self._waiting) == (count == 0 and block in self._kept)
            assert not (block in self._free and block in self._waiting)
        assert all(count > 0 for count in self._kept.values())
        known = {digest: block for block, digests in self._hashes_of.items() for digest in digests}
        assert known == self._block_of

    def _forget(self, block: int) -> None:
        for digest in self._hashes_of.pop(block, ()):
            del self._block_of[digest]
