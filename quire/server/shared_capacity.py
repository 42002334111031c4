from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping


class BytesByOwner:
    """The total and the largest owner are found without a search over all owners, because gateways name ever more of
    them.
    """

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self._sizes = dict(sizes or {})
        self._sorted = sorted((size, owner) for owner, size in self._sizes.items())
        self._total = sum(self._sizes.values())
        self._sizes_before: dict[str, int] | None = None
        """Owners that the transaction has changed, with the sizes that they had before; None outside a transaction."""

    def __getitem__(self, owner: str) -> int:
        return self._sizes.get(owner, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def total_bytes(self) -> int:
        return self._total

    def largest_owner(self) -> str:
        """Raises IndexError if no owner has bytes."""
        return self._sorted[-1][1]

    def add_bytes(self, owner: str, num_bytes: int) -> None:
        """Forgets owners whose bytes fall to 0."""
        size = self[owner]
        if self._sizes_before is not None:
            self._sizes_before.setdefault(owner, size)
        self._set_size(owner, size + num_bytes)

    def begin_transaction(self) -> None:
        """Until `commit`, `revert` restores the sizes of this moment."""
        self._sizes_before = {}

    def commit(self) -> None:
        self._sizes_before = None

    def revert(self) -> None:
        for owner, size in (self._sizes_before or {}).items():
            self._set_size(owner, size)
        self._sizes_before = None

    def _set_size(self, owner: str, size: int) -> None:
        before = self._sizes.pop(owner, 0)
        if before:
            del self._sorted[bisect_left(self._sorted, (before, owner))]
        if size:
            self._sizes[owner] = size
            insort(self._sorted, (size, owner))
        self._total += size - before


class SharedCapacity:
    """An owner is the name of a tenant, or "" without API keys."""

    def __init__(self, size: int, usage: BytesByOwner | None = None) -> None:
        """`usage` has what each owner uses. Pass it if other code reads it or reverts it."""
        self._size = size
        self._usage = BytesByOwner() if usage is None else usage

    @property
    def total_used(self) -> int:
        return self._usage.total_bytes()

    def has_room(self, owner: str, amount: int) -> bool:
        return amount <= self.available_to_owner(owner)

    def available_to_owner(self, owner: str) -> int:
        """A tenant must leave as much free as it uses; the owner "" may take all that is free."""
        free, mine = self._size - self.total_used, self._usage[owner]
        return free - mine if owner else free

    def used_by_owner(self, owner: str) -> int:
        return self._usage[owner]

    def adjust_held_amount(self, owner: str, amount: int) -> None:
        self._usage.add_bytes(owner, amount)
