"""Remembers the last turn of each named conversation, so that it can be computed again before the next turn."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec

from quire.engine import clock
from quire.engine.types import EngineCoreRequest

TENANT_BYTES = 8 << 20
"""The limit for one tenant's conversations: two million tokens."""
ALL_BYTES = 64 << 20
"""The limit for all tenants together."""
_BESIDE = 500
"""The bytes that a turn takes beside its tokens."""


class Turn(msgspec.Struct, frozen=True, array_like=True):
    ended: float
    """Seconds of the Unix clock."""
    tenant: str
    adapter: str
    """Its name; "" for none."""
    keep_seconds: float
    """The value of its request."""
    tokens: bytes
    """The prompt's and the answer's tokens, four bytes each."""

    @property
    def ids(self) -> list[int]:
        return array("i", self.tokens).tolist()


class LastTurns:
    def __init__(self, tenant_bytes: int = TENANT_BYTES, all_bytes: int = ALL_BYTES) -> None:
        self._tenant_bytes, self._all_bytes = tenant_bytes, all_bytes
        self._turns: OrderedDict[tuple[str, str, str], Turn] = OrderedDict()
        """By tenant, cache salt and name; the turn that ended last is at the end."""
        self._bytes = Counter[str]()
        """By tenant."""

    @property
    def bytes(self) -> int:
        return self._bytes.total()

    def ended(self, request: EngineCoreRequest, emitted: Sequence[int]) -> None:
        """A request has ended. `emitted`: the tokens that it generated after its `emitted_ids`."""
        if not request.session:
            return
        key = request.tenant, request.cache_salt, request.session
        self._drop(key)
        if request.spans:  # images are not remembered
            return
        tokens = array("i", [*request.prompt_ids, *request.emitted_ids, *emitted]).tobytes()
        adapter = "" if request.adapter is None else request.adapter.name
        turn = Turn(clock.time(), request.tenant, adapter, request.keep_seconds, tokens)
        self._turns[key] = turn
        self._bytes[turn.tenant] += _size(turn)
        while self._bytes[turn.tenant] > self._tenant_bytes:
            self._drop(next(each for each, of in self._turns.items() if of.tenant == turn.tenant))
        while self.bytes > self._all_bytes:  # the tenant with the most bytes loses its oldest turn
            (tenant, _) = self._bytes.most_common(1)[0]
            self._drop(next(each for each, of in self._turns.items() if of.tenant == tenant))

    def find(self, tenant: str, salt: str, session: str) -> Turn | None:
        return self._turns.get((tenant, salt, session))

    def _drop(self, key: tuple[str, str, str]) -> None:
        turn = self._turns.pop(key, None)
        if turn is not None:
            self._bytes[turn.tenant] -= _size(turn)
            if not self._bytes[turn.tenant]:
                del self._bytes[turn.tenant]


def _size(turn: Turn) -> int:
    return len(turn.tokens) + _BESIDE
