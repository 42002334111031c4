"""Stores each session's last turn, so that it can be computed again before the next turn."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence

import msgspec

from quire.engine.common import clock
from quire.engine.common.types import EngineCoreRequest

MAX_TENANT_BYTES = 8 << 20
"""Room for two million tokens."""
MAX_TOTAL_BYTES = 64 << 20
_TURN_OVERHEAD_BYTES = 500


class Turn(msgspec.Struct, frozen=True, array_like=True):
    ended_at: float
    """Unix time."""
    tenant: str
    adapter: str
    """"" without an adapter."""
    keep_seconds: float
    tokens: bytes
    """Prompt and answer, four bytes per token."""

    @property
    def token_ids(self) -> list[int]:
        return array("i", self.tokens).tolist()


class LastSessionTurns:
    def __init__(self, max_tenant_bytes: int = MAX_TENANT_BYTES, max_total_bytes: int = MAX_TOTAL_BYTES) -> None:
        self._max_tenant_bytes, self._max_total_bytes = max_tenant_bytes, max_total_bytes
        self._turn_of_session: OrderedDict[tuple[str, str, str], Turn] = OrderedDict()
        """Keyed by tenant, cache salt and session, in the order in which the turns ended."""
        self._bytes_of_tenant = Counter[str]()

    @property
    def total_bytes(self) -> int:
        return self._bytes_of_tenant.total()

    def record_turn(self, request: EngineCoreRequest, generated: Sequence[int]) -> None:
        if not request.session:
            return
        key = request.tenant, request.cache_salt, request.session
        self._drop_turn(key)
        if request.spans:
            return
        tokens = array("i", [*request.prompt_ids, *request.emitted_ids, *generated]).tobytes()
        adapter = "" if request.adapter is None else request.adapter.name
        turn = Turn(clock.time(), request.tenant, adapter, request.keep_seconds, tokens)
        self._turn_of_session[key] = turn
        self._bytes_of_tenant[turn.tenant] += _turn_bytes(turn)
        while self._bytes_of_tenant[turn.tenant] > self._max_tenant_bytes:
            self._drop_turn(
                next(
                    session_key
                    for session_key, other_turn in self._turn_of_session.items()
                    if other_turn.tenant == turn.tenant
                )
            )
        while self.total_bytes > self._max_total_bytes:
            (tenant, _) = self._bytes_of_tenant.most_common(1)[0]
            self._drop_turn(
                next(
                    session_key
                    for session_key, other_turn in self._turn_of_session.items()
                    if other_turn.tenant == tenant
                )
            )

    def find_session_turn(self, tenant: str, salt: str, session: str) -> Turn | None:
        return self._turn_of_session.get((tenant, salt, session))

    def _drop_turn(self, key: tuple[str, str, str]) -> None:
        turn = self._turn_of_session.pop(key, None)
        if turn is not None:
            self._bytes_of_tenant[turn.tenant] -= _turn_bytes(turn)
            if not self._bytes_of_tenant[turn.tenant]:
                del self._bytes_of_tenant[turn.tenant]


def _turn_bytes(turn: Turn) -> int:
    return len(turn.tokens) + _TURN_OVERHEAD_BYTES
