"""Bytes of memory that all requests together may hold, shared among keys."""

from __future__ import annotations

from collections import Counter


class Budget:
    """Counts what each owner holds; an owner is a tenant's name, empty on a server without keys."""

    def __init__(self, size: int, held_by: Counter[str] | None = None) -> None:
        """`held_by`: counts by owner that others read, or set back."""
        self._size = size
        self._held_by: Counter[str] = Counter() if held_by is None else held_by

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
        self._held_by[owner] += more
        if not self._held_by[owner]:
            del self._held_by[owner]  # gateways tell owners' names, ever new ones
