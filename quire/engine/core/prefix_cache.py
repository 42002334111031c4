"""The prefix cache: which blocks already hold a request's first tokens, and the hashes by which its own are found."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.core.block_pool import NULL_BLOCK, block_hash_with_group_id
from quire.engine.core.block_tables import BlockTables, without_null_blocks
from quire.engine.core.request import Request
from quire.engine.core.scheduler_output import BlockCopy
from quire.engine.core.sessions import Sessions
from quire.engine.core.state_snapshots import NoSnapshots
from quire.engine.core.stats import Counts


class PrefixCache:
    """Finds blocks by the tokens in them. The beginning of a large block may be shared by copying it."""

    def __init__(
        self,
        tables: BlockTables,
        hash_block_size: int,
        counts: Counts,
        *,
        enabled: bool,
        snapshots: NoSnapshots | None = None,
    ) -> None:
        """`hash_block_size`: tokens per hash; a divisor of the block size. If not `enabled`, nothing is found.
        `snapshots`: the state snapshots that a request needs in addition to blocks; by default none."""
        self.block_size = block_size = tables.needs.block_size
        assert block_size % hash_block_size == 0
        self.enabled = enabled
        self.snapshots = snapshots or NoSnapshots()
        self._sessions = Sessions(tables.pool, snapshots=self.snapshots, counts=counts)
        self._counts = counts
        self._tables = tables
        self._pool = tables.pool
        self._groups = tables.num_groups
        self._hash_block_size = hash_block_size
        self._hashes_per_block = block_size // hash_block_size
        self._written: dict[int, int] = {}
        """For each block that the step being scheduled writes to, the first of its tokens that it writes."""

    @property
    def unit(self) -> int:
        """Cached prefixes are multiples of this many tokens; 0 if the cache is off."""
        return max(self._hash_block_size, self.snapshots.every) if self.enabled else 0

    def begin_step(self) -> None:
        self._written.clear()
        self._sessions.begin_step()
        self.snapshots.begin_step()

    def block_hashes(self, request: Request) -> list[Sequence[bytes]]:
        """For each full block of the request's tokens but the last, which must be computed: the hashes of its
        beginnings. The last of these is the hash of the whole block."""
        if not self.enabled or request.needs_every_token:
            return []
        digests = request.block_hashes((len(request.token_ids) - 1) // self._hash_block_size, self._hash_block_size)
        return [
            digests[end - self._hashes_per_block : end]
            for end in range(self._hashes_per_block, len(digests) + 1, self._hashes_per_block)
        ]

    def get_computed_blocks(self, request: Request) -> list[int]:
        """Cached blocks for a waiting request's tokens but the last, as BlockTables.find_cached_blocks gives them."""
        digests = [pieces[-1] for pieces in self.block_hashes(request)]
        pages = self._tables.find_cached_blocks(digests)
        usable = self.snapshots.usable(digests[: len(pages) // self._groups])
        return pages if usable * self._groups == len(pages) else self._tables.find_cached_blocks(digests[:usable])

    def use_computed_blocks(self, request: Request, cached: list[int]) -> None:
        """Let a request that has a slot and no blocks start with these."""
        self._tables.set_cached_blocks(request, cached)
        request.num_cached_hashes = len(cached) // self._groups * self._hashes_per_block
        self.snapshots.begin(request)

    def count_hits(self, request: Request) -> None:
        """Count the hits of a request that starts, the first time that it does."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            self._counts.prefix_queries += request.num_prompt_tokens
            self._counts.prefix_hits += request.num_cached_tokens
            if self.enabled and request.engine_request.sampling is not None:
                self._sessions.began(
                    request,
                    request.block_hashes(len(request.token_ids) // self._hash_block_size, self._hash_block_size),
                )

    def free(self, request: Request) -> None:
        """Free all blocks of a request; some are pinned for the next turn of its conversation."""
        if self.enabled and request.engine_request.sampling is not None:
            pages = without_null_blocks(
                request.block_ids[: request.num_cached_hashes // self._hashes_per_block * self._groups]
            )
            digests = request.block_hashes(request.num_cached_hashes, self._hash_block_size)
            self._sessions.left(request, [page for page in pages if page in self._pool.cached_blocks], digests)
        self._tables.free(request)

    def reset(self) -> None:
        """Forget everything that was computed so far."""
        self._sessions.forget()
        self._pool.reset()
        self.snapshots.forget()

    def copy_partial_blocks(self, request: Request) -> list[BlockCopy]:
        """If each group has a cached block that begins as the request's next block does, allocate blocks for the
        request and return the copies of these beginnings.

        Copies are made before the step computes anything, so what the step itself writes cannot be copied.
        """
        if self._hashes_per_block == 1 or not self.enabled or request.needs_every_token:
            return []
        first = len(request.block_ids) // self._groups * self._hashes_per_block
        digests = request.block_hashes((len(request.token_ids) - 1) // self._hash_block_size, self._hash_block_size)[
            first : first + self._hashes_per_block - 1
        ]
        for count in range(len(digests), 0, -1):
            found = self._find_partial_blocks(digests[count - 1], count * self._hash_block_size)
            if len(found) == self._groups:
                # A block that was found and has no references may be among those allocated. Then its group goes on in
                # it: there is nothing to copy, and no other copy overwrites it.
                new = self._pool.allocate(self._groups)
                others = iter([page for page in new if page not in found])
                pages = [page if page in new else next(others) for page in found]
                request.block_ids += pages
                request.num_computed_tokens += count * self._hash_block_size
                pairs = zip(found, pages, strict=True)
                return [BlockCopy(*pair, count * self._hash_block_size) for pair in pairs if pair[0] != pair[1]]
        return []

    def _find_partial_blocks(self, digest: bytes, tokens: int) -> list[int]:
        """The block of each group whose first tokens have this hash and were written before this step, because copies
        are made first."""
        found = [self._pool.get_cached_block(block_hash_with_group_id(digest, group)) for group in range(self._groups)]
        return [page for page in found if page is not None and tokens <= self._written.get(page, self.block_size)]

    def cache_blocks(self, request: Request, start: int, known: int) -> None:
        """Register the hashes of the blocks that are full now, and note what the step writes: it computes the tokens
        from `start` on, of which the first `known` tokens are known and the rest are drafts."""
        if not self.enabled or request.num_computed_tokens == start:
            return
        self.snapshots.keep(request, known)
        full = min(request.num_computed_tokens, len(request.token_ids)) // self._hash_block_size
        if full > request.num_cached_hashes:
            for index, digest in enumerate(
                request.block_hashes(full, self._hash_block_size)[request.num_cached_hashes :],
                request.num_cached_hashes,
            ):
                first = index // self._hashes_per_block * self._groups
                for group, page in enumerate(request.block_ids[first : first + self._groups]):
                    if page != NULL_BLOCK:
                        self._pool.cache_block(page, block_hash_with_group_id(digest, group))
            request.num_cached_hashes = full
        if self._hashes_per_block > 1:  # what is written matters to forks alone
            for index in range(start // self.block_size, -(-request.num_computed_tokens // self.block_size)):
                for page in request.block_ids[index * self._groups : (index + 1) * self._groups]:
                    self._written[page] = max(start - index * self.block_size, 0)

    def full_pages(self, request: Request) -> list[tuple[int, bytes]]:
        """A sequence's pages that can be found, each with its own hash. Only where all layers are one group."""
        assert self._groups == 1
        count = request.num_cached_hashes // self._hashes_per_block
        digests = request.block_hashes(count * self._hashes_per_block, self._hash_block_size)[
            self._hashes_per_block - 1 :: self._hashes_per_block
        ]
        return [
            (page, digest)
            for page, digest in zip(request.block_ids, digests, strict=False)
            if self._pool.has_hash(digest)
        ]
