"""Snapshots of states that are too large for every page (MatrixState in engine/checkpoint/page_groups.py): whoever
begins behind a cached page needs one that was kept there. A snapshot is a slot that no sequence has: keeping one copies
a sequence's slot to it, using it copies it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.engine.core.block_pool import BlockPool
from quire.engine.core.request import Request
from quire.engine.core.scheduler_output import SlotCopy

_WORTHWHILE = 64
"""Tokens computed since a sequence's last snapshot that make one at its prompt's end worth a step of its own."""


class SnapshotPlan(NamedTuple):
    slots: int
    every: int
    """Tokens, a multiple of a page's."""


class Standing(NamedTuple):
    """A snapshot at the end of a sequence's first pages."""

    snapshot: int
    pages: int


class _Kept(NamedTuple):
    """A snapshot that a step is to take."""

    snapshot: int
    digest: bytes
    """Of the page at whose end it stands."""
    slot: int


class NoSnapshots:
    """For models whose pages hold all that a sequence needs."""

    every = 0
    """Tokens in multiples of which snapshots are kept, beside those at prompts' ends."""
    needed = False
    """Whether a sequence needs one to begin behind a page."""
    pool: BlockPool | None = None
    """In which they can be kept for somebody, as pages can."""

    def usable(self, digests: Sequence[bytes]) -> int:
        """Of pages with these hashes, behind how many of the first ones a sequence can begin."""
        return len(digests)

    def begin_step(self) -> None:
        """Another step is decided: what the steps before it keep can be used."""

    def bound(self, request: Request, most: int) -> int:
        """How many of `most` known tokens a sequence may compute in the next step."""
        return most

    def drafts(self, known: int, most: int) -> int:
        """How many of `most` guesses may follow a sequence's `known` tokens in the next step."""
        return most

    def begin(self, request: Request) -> None:
        """A sequence got a slot, and the pages of its first `computed` tokens."""

    def keep(self, request: Request, known: int) -> None:
        """A step takes a sequence's state to its first `known` tokens, none of them a guess."""

    def take_copies(self) -> list[SlotCopy]:
        """What is to be copied before the step that is being decided computes anything, in this order."""
        return []

    def forget(self) -> None:
        """Let no snapshot be found."""

    def watch(self, secure: Callable[[Sequence[int]], None]) -> None:
        """`secure`: called with slots that are about to be overwritten, as ~slot."""

    def knows(self, digest: bytes) -> bool:
        """Whether there is one at the end of the page with this hash."""
        return True

    def full_slots(self, request: Request) -> list[tuple[int, bytes]]:
        """Those at the ends of a sequence's pages: their slots, as ~slot, and the pages' hashes."""
        return []

    def standing(self, request: Request, pages: int) -> list[Standing]:
        """Those that a conversation's next turn may begin with, of which so many pages are kept: the last one, and the
        last one within the prompt, for templates may tell an answer otherwise later."""
        return []

    def room(self) -> int | None:
        """A slot for a snapshot that comes from a tier, which `came` gives back; None: there is none now."""
        return None

    def came(self, slot: int, digest: bytes, *, whole: bool) -> None:
        """It has come, or not: not `whole`. `digest`: of its page."""


class Snapshots(NoSnapshots):
    """They are kept at every so many tokens, counted from a sequence's beginning, and at the last page's end within its
    prompt, so that a conversation's next turn finds one. Steps end there. The least recently used ones make room; those
    whose page is cached no longer go first."""

    needed = True

    def __init__(self, pages: BlockPool, block_size: int, plan: SnapshotPlan, first_slot: int) -> None:
        """The snapshots are the slots from `first_slot` on."""
        assert plan.every % block_size == 0
        self._pages, self._block_size, self.every, self._first_slot = pages, block_size, plan.every, first_slot
        self.pool = self._pool = BlockPool(plan.slots)
        self._digests: dict[int, bytes] = {}
        self._copies: list[SlotCopy] = []
        self._kept: list[_Kept] = []
        """By the step that was decided last: it has to compute them first."""

    def usable(self, digests: Sequence[bytes]) -> int:
        return next((count for count in range(len(digests), 0, -1) if self._pool.has_hash(digests[count - 1])), 0)

    def begin_step(self) -> None:
        for kept, digest, slot in self._kept:
            self._pool.cache_block(kept, digest)
            self._pool.unref([kept])
            self._digests[kept] = digest
            self._copies.append(SlotCopy(slot, self._first_slot + kept))
        self._kept = []

    def bound(self, request: Request, most: int) -> int:
        return min(most, self._next(request) - request.num_computed_tokens)

    def drafts(self, known: int, most: int) -> int:
        """The next step must be able to end at the next place."""
        return min(most, self._regular(known) - known - 1)

    def begin(self, request: Request) -> None:
        assert request.slot is not None
        request.num_snapshot_tokens = request.num_computed_tokens
        if request.num_computed_tokens:
            found = self._pool.get_cached_block(self._digest(request, request.num_computed_tokens))
            assert found is not None, "a sequence begins where no snapshot is"
            self._pool.ref([found])
            self._pool.unref([found])  # now it is the most recently used one
            self._copies.append(SlotCopy(self._first_slot + found, request.slot))

    def keep(self, request: Request, known: int) -> None:
        place = known % self.every == 0 or known == self._prompt_end(request)
        if not place or known > len(request.token_ids):
            return
        assert request.slot is not None
        request.num_snapshot_tokens, digest = known, self._digest(request, known)
        if self._pool.has_hash(digest):
            return
        self._let_go()
        if self._pool.num_free:
            (kept,) = self._pool.allocate(1)
            self._digests.pop(kept, None)
            self._kept.append(_Kept(kept, digest, request.slot))

    def take_copies(self) -> list[SlotCopy]:
        copies, self._copies = self._copies, []
        return copies

    def forget(self) -> None:
        self._pool.reset()
        self._digests.clear()
        self._pool.unref([each.snapshot for each in self._kept])
        self._kept = []

    def watch(self, secure: Callable[[Sequence[int]], None]) -> None:
        self._pool.before_reuse = lambda kept: secure([~(self._first_slot + each) for each in kept])

    def knows(self, digest: bytes) -> bool:
        return self._pool.has_hash(digest)

    def full_slots(self, request: Request) -> list[tuple[int, bytes]]:
        """Those that a copy fills only when the next step begins are left out: they are kept with the next sequence."""
        filling, found = {copy.target for copy in self._copies}, []
        for digest in request.block_hashes(
            min(request.num_computed_tokens, len(request.token_ids)) // self._block_size, self._block_size
        ):
            kept = self._pool.get_cached_block(digest)
            if kept is not None and (slot := self._first_slot + kept) not in filling:
                found.append((~slot, digest))
        return found

    def standing(self, request: Request, pages: int) -> list[Standing]:
        full = min(request.num_computed_tokens, len(request.token_ids)) // self._block_size
        digests, found = request.block_hashes(full, self._block_size)[:pages], list[Standing]()
        for most in (len(digests), (request.num_prompt_tokens - 1) // self._block_size):
            if count := self.usable(digests[:most]):
                kept = self._pool.get_cached_block(digests[count - 1])
                assert kept is not None
                found.append(Standing(kept, count))
        return list(dict.fromkeys(found))

    def room(self) -> int | None:
        self._let_go()
        if not self._pool.num_free:
            return None
        (kept,) = self._pool.allocate(1)
        digest, slot = self._digests.pop(kept, None), self._first_slot + kept
        if any(slot in (copy.source, copy.target) for copy in self._copies):  # which the next step makes
            if digest is not None:  # it stays what it is: the sequence that asks may be about to begin there
                self._pool.cache_block(kept, digest)
                self._digests[kept] = digest
            self._pool.unref([kept])
            return None
        return slot

    def came(self, slot: int, digest: bytes, *, whole: bool) -> None:
        kept = slot - self._first_slot
        if whole:
            self._pool.cache_block(kept, digest)
            self._digests[kept] = digest
        self._pool.unref([kept])

    def _next(self, request: Request) -> int:
        """The first place behind a sequence's computed tokens."""
        regular, end = self._regular(request.num_computed_tokens), self._prompt_end(request)
        return end if end is not None and request.num_computed_tokens < end < regular else regular

    def _regular(self, tokens: int) -> int:
        return (tokens // self.every + 1) * self.every

    def _prompt_end(self, request: Request) -> int | None:
        """The last page's end within the prompt, whose last token must be computed in any case; None where too little
        is computed up to there."""
        end = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        return end if end - request.num_snapshot_tokens >= _WORTHWHILE else None

    def _digest(self, request: Request, tokens: int) -> bytes:
        """Of the page at whose end so many tokens are."""
        return request.block_hashes(tokens // self._block_size, self._block_size)[-1]

    def _let_go(self) -> None:
        """Of snapshots whose page is cached no longer."""
        for kept, digest in list(self._digests.items()):
            if not self._pages.has_hash(digest) and not self._pool.is_pinned(kept):
                self._pool.evict(kept)
                del self._digests[kept]


def choose_snapshots(pages: BlockPool, block_size: int, plan: SnapshotPlan | None, first_slot: int) -> NoSnapshots:
    """By default none."""
    return NoSnapshots() if plan is None else Snapshots(pages, block_size, plan, first_slot)
