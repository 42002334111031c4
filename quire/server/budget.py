"""Bytes of memory that all requests together may hold, shared among keys."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping


class OwnerSizes:
    """Bytes by owner. Neither the total nor the largest owner takes a search, for owners may be many: gateways tell
    their names, ever new ones."""

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self._sizes = dict(sizes or {})
        self._sorted = sorted((size, owner) for owner, size in self._sizes.items())
        self._total = sum(self._sizes.values())
        self._before: dict[str, int] | None = None
        """Sizes at `begin` of the owners that changed since; None outside of a transaction."""

    def __getitem__(self, owner: str) -> int:
        return self._sizes.get(owner, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def total(self) -> int:
        return self._total

    def largest(self) -> str:
        """The owner with most bytes. Raises IndexError if nobody has any."""
        return self._sorted[-1][1]

    def add(self, owner: str, more: int) -> None:
        """`more` may be negative. An owner without bytes is forgotten."""
        size = self[owner]
        if self._before is not None:
            self._before.setdefault(owner, size)
        self._set(owner, size + more)

    def begin(self) -> None:
        """`revert` goes back to the sizes of this moment, until `commit`."""
        self._before = {}

    def commit(self) -> None:
        self._before = None

    def revert(self) -> None:
        for owner, size in (self._before or {}).items():
            self._set(owner, size)
        self._before = None

    def _set(self, owner: str, size: int) -> None:
        before = self._sizes.pop(owner, 0)
        if before:
            del self._sorted[bisect_left(self._sorted, (before, owner))]
        if size:
            self._sizes[owner] = size
            insort(self._sorted, (size, owner))
        self._total += size - before


class Budget:
    """Counts what each owner holds; an owner is a tenant's name, empty on a server without keys."""

    def __init__(self, size: int, held_by: OwnerSizes | None = None) -> None:
        """`held_by`: counts by owner that others read, or set back."""
        self._size = size
        self._held_by = OwnerSizes() if held_by is None else held_by

    @property
    def held(self) -> int:
        """Bytes that are taken."""
        return self._held_by.total()

    def fits(self, owner: str, more: int) -> bool:
        """Whether `more` bytes are left."""
        return more <= self.room(owner)

    def room(self, owner: str) -> int:
        """Bytes that are left. Where keys are asked for, a tenant that holds some gets more only while as much is left
        to others."""
        free, mine = self._size - self.held, self._held_by[owner]
        return free - mine if owner else free

    def held_of(self, owner: str) -> int:
        """Bytes that an owner has taken."""
        return self._held_by[owner]

    def take(self, owner: str, more: int) -> None:
        """A negative number gives back."""
        self._held_by.add(owner, more)
