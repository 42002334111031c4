"""What the other API processes of this server know, if --api-server-count starts several. Each process counts a part of
the metrics, and a question about a request may reach any of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.engine.link.client import EngineClient
from quire.engine.link.hub_link import HubLink
from quire.engine.link.hub_messages import LASTING
from quire.engine.prefixes.turns import Turn
from quire.server.access.authentication import tenant_of
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.encoding import encode_json
from quire.server.observe import summed
from quire.server.observe.explain import explanation
from quire.server.observe.metrics import Metrics
from quire.server.observe.prefix_use import Decode, ordered, turns
from quire.server.observe.recent import MOST_ANSWERS, recent_answers
from quire.server.observe.request_log import RequestLog
from quire.server.observe.summed import Count

_EXPLAIN, _RECENT, _CANCEL, _TURNS, _LAST = "explain", "recent", "cancel", "turns", "last turn"


class OtherProcesses:
    """Asks the other processes, and answers their questions. A single process asks nobody."""

    def __init__(self, client: EngineClient, metrics: Metrics, log: RequestLog, decode: Decode) -> None:
        """`decode`: makes text of tokens."""
        self._client = client
        self._decode = decode
        self._metrics = metrics
        self._log = log
        self._remote = client.link if isinstance(client.link, HubLink) else None
        if self._remote is not None:
            self._remote.answering = {
                LASTING: self._say_counts,
                _EXPLAIN: self._say_explanation,
                _RECENT: self._say_recent,
                _CANCEL: self._say_cancelled,
                _TURNS: self._say_turns,
                _LAST: self._say_last_turn,
            }

    async def counts(self) -> list[Count]:
        """The counts of the other processes, including those that have ended."""
        found = self._inherited()
        for said in await self._ask(LASTING):
            found += summed.decode(said)
        return found

    def explained(self, name: str, caller: Mapping[str, Any]) -> bytes | None:
        """The explanation of a request as JSON, if this process knows the request and the caller (an ASGI scope) may
        see it. The content of prompts is shown only to the owner of the prompt."""
        log, scope = self._log, dict(caller)
        record = log.find(name, scope)
        if record is None:
            return None
        decode = self._decode if record.owner == tenant_of(scope).name else None
        told = explanation(record, self._client.history, lambda sequence: log.may_name(sequence, scope), decode)
        return encode_json(told)

    async def turns(self, conversation: str, caller: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The turns of a conversation that the caller may see, wherever they were answered."""
        tenant = tenant_of(dict(caller))
        said = await self._ask(_TURNS, _encode((conversation, tenant.name, tenant.admin)))
        return ordered([*self._turns(conversation, caller), *(turn for part in map(_turns, said) for turn in part)])

    def _turns(self, conversation: str, caller: Mapping[str, Any]) -> list[dict[str, Any]]:
        return turns(self._log, self._client.history, conversation, lambda each: self._log.may_name(each, dict(caller)))

    async def last_turn(self, tenant: str, salt: str, session: str) -> Turn | None:
        """The last turn of a conversation with a name, whoever answered it."""
        own = self._client.turns
        assert own is not None
        said = await self._ask(_LAST, _encode((tenant, salt, session)))
        found = [own.find(tenant, salt, session), *(msgspec.msgpack.decode(each, type=Turn) for each in said)]
        return max((each for each in found if each is not None), key=lambda each: each.ended, default=None)

    async def explanation(self, name: str, tenant: Tenant) -> bytes | None:
        """The explanation by another process of a request that the tenant may see. None if no process knows it."""
        said = await self._ask(_EXPLAIN, _encode((name, tenant.name, tenant.admin)))
        return said[0] if said else None

    async def recent(self, limit: int) -> list[dict[str, Any]]:
        """The result of recent_answers in each of the other processes."""
        return [msgspec.json.decode(said) for said in await self._ask(_RECENT, _encode(limit))]

    async def cancel(self, request_id: str, tenant: str | None) -> int:
        """As EngineClient.cancel, of their requests."""
        said = await self._ask(_CANCEL, _encode((request_id, tenant)))
        return sum(msgspec.msgpack.decode(each, type=int) for each in said)

    async def _ask(self, topic: str, body: bytes = b"") -> list[bytes]:
        return [] if self._remote is None else await self._remote.ask(topic, body)

    def _inherited(self) -> list[Count]:
        inherited = None if self._remote is None else self._remote.inherited
        return summed.decode(inherited) if inherited else []

    async def _say_counts(self, body: bytes) -> bytes:
        return summed.encode([*self._metrics.counts(), *self._inherited()])

    async def _say_explanation(self, body: bytes) -> bytes | None:
        return self.explained(*_asked(body))

    async def _say_turns(self, body: bytes) -> bytes:
        return encode_json(self._turns(*_asked(body)))

    async def _say_last_turn(self, body: bytes) -> bytes | None:
        own = self._client.turns
        assert own is not None
        found = own.find(*msgspec.msgpack.decode(body, type=tuple[str, str, str]))
        return None if found is None else _encode(found)

    async def _say_recent(self, body: bytes) -> bytes:
        limit = min(msgspec.msgpack.decode(body, type=int), MOST_ANSWERS)
        return encode_json(recent_answers(self._log, self._client.history, limit))

    async def _say_cancelled(self, body: bytes) -> bytes:
        request_id, tenant = msgspec.msgpack.decode(body, type=tuple[str, str | None])
        return _encode(self._client.cancel(request_id, tenant))


_encode = msgspec.msgpack.encode


_turns = msgspec.json.Decoder(list[dict[str, Any]]).decode


def _asked(body: bytes) -> tuple[str, dict[str, Any]]:
    """What another process asks about, and its caller's scope."""
    name, owner, admin = msgspec.msgpack.decode(body, type=tuple[str, str, bool])
    return name, {"tenant": Tenant(owner, b"", RateLimits(None, None), admin=admin)}
