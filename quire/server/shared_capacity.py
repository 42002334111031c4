"""Bytes of memory that all requests together may hold, shared among keys."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping


class BytesByOwner:
    """Bytes by owner. Neither the total nor the largest owner takes a search, for owners may be many: gateways tell
    their names, ever new ones."""

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self._sizes = dict(sizes or {})
        self._sorted = sorted((size, owner) for owner, size in self._sizes.items())
        self._total = sum(self._sizes.values())
        self._sizes_before: dict[str, int] | None = None
        """Sizes at `begin_transaction` of the owners that changed since; None outside of a transaction."""

    def __getitem__(self, owner: str) -> int:
        return self._sizes.get(owner, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def total_bytes(self) -> int:
        return self._total

    def largest_owner(self) -> str:
        """The owner with most bytes. Raises IndexError if nobody has any."""
        return self._sorted[-1][1]

    def add_bytes(self, owner: str, num_bytes: int) -> None:
        """`num_bytes` may be negative. An owner without bytes is forgotten."""
        size = self[owner]
        if self._sizes_before is not None:
            self._sizes_before.setdefault(owner, size)
        self._set_size(owner, size + num_bytes)

    def begin_transaction(self) -> None:
        """`revert` goes back to the sizes of this moment, until `commit`."""
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
    """Counts what each owner holds; an owner is a tenant's name, empty on a server without keys."""

    def __init__(self, size: int, usage: BytesByOwner | None = None) -> None:
        """`usage`: counts by owner that others read, or set back."""
        self._size = size
        self._usage = BytesByOwner() if usage is None else usage

    @property
    def total_used(self) -> int:
        """Bytes that are taken."""
        return self._usage.total_bytes()

    def has_room(self, owner: str, amount: int) -> bool:
        """Whether `amount` bytes are left."""
        return amount <= self.available_to_owner(owner)

    def available_to_owner(self, owner: str) -> int:
        """Bytes that are left. Where keys are asked for, a tenant that holds some gets more only while as much is left
        to others."""
        free, mine = self._size - self.total_used, self._usage[owner]
        return free - mine if owner else free

    def used_by_owner(self, owner: str) -> int:
        """Bytes that an owner has taken."""
        return self._usage[owner]

    def adjust_held_amount(self, owner: str, amount: int) -> None:
        """A negative number gives back."""
        self._usage.add_bytes(owner, amount)
