"""What the other API processes of this server know, if --api-server-count starts several. Each process counts a part of
the metrics, and a question about a request may reach any of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from quire.engine.link.client import EngineClient
from quire.engine.link.hub_link import HubLink
from quire.engine.link.hub_messages import LASTING
from quire.engine.prefixes.turns import Turn
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.encoding import answering, encode_json, form_of, pack
from quire.server.observe import summed
from quire.server.observe.explain import explanation
from quire.server.observe.http_metrics import HttpMetrics, lasting
from quire.server.observe.metrics import Metrics
from quire.server.observe.prefix_use import Decode, ordered, turns
from quire.server.observe.recent import MOST_ANSWERS, recent_answers
from quire.server.observe.request_log import RequestLog
from quire.server.observe.summed import Count


class OtherProcesses:
    """Asks the other processes, and answers their questions. A single process asks nobody."""

    def __init__(self, client: EngineClient, metrics: Metrics, log: RequestLog, decode: Decode) -> None:
        """`decode`: makes text of tokens."""
        self._client = client
        self._decode = decode
        self._metrics = metrics
        self._log = log
        self.http: HttpMetrics | None = None
        """The metrics of the server's HTTP requests, which belong to no model."""
        self._remote = client.link if isinstance(client.link, HubLink) else None
        if self._remote is not None:
            kind = OtherProcesses
            asked = (kind.explained, kind.own_recent, kind.own_cancelled, kind.own_turns, kind.own_last_turn)
            for each in asked:
                self._remote.answering.add(each.__qualname__, answering(self, each))
            self._remote.answering.add(LASTING, answering(self, kind.own_counts))

    async def counts(self) -> list[Count]:
        """The counts of the other processes, including those that have ended."""
        said = await self._ask(OtherProcesses.own_counts, topic=LASTING)
        return [*self._inherited(), *chain.from_iterable(said)]

    def own_counts(self) -> list[Count]:
        http = [] if self.http is None else self.http.counts()
        return [*self._metrics.counts(), *http, *self._inherited()]

    async def explanation(self, name: str, tenant: Tenant) -> bytes | None:
        """The explanation by another process of a request that the tenant may see. None if no process knows it."""
        said = await self._ask(OtherProcesses.explained, name, tenant.name, tenant.admin)
        return said[0] if said else None

    def explained(self, name: str, owner: str, admin: bool) -> bytes | None:
        """The explanation of a request as JSON, if this process knows the request and a tenant may see it: its owner,
        or an admin. The content of prompts is shown only to the owner of the prompt."""
        scope = _caller(owner, admin=admin)
        record = self._log.find(name, scope)
        if record is None:
            return None
        decode = self._decode if record.owner == owner else None
        return encode_json(explanation(record, self._client.history, partial(self._log.may_name, caller=scope), decode))

    async def turns(self, conversation: str, tenant: Tenant) -> list[dict[str, Any]]:
        """The turns of a conversation that the tenant may see, wherever they were answered."""
        asked = conversation, tenant.name, tenant.admin
        return ordered(
            [*self.own_turns(*asked), *chain.from_iterable(await self._ask(OtherProcesses.own_turns, *asked))]
        )

    def own_turns(self, conversation: str, owner: str, admin: bool) -> list[dict[str, Any]]:
        may_name = partial(self._log.may_name, caller=_caller(owner, admin=admin))
        return turns(self._log, self._client.history, conversation, may_name)

    async def last_turn(self, tenant: str, salt: str, session: str) -> Turn | None:
        """The last turn of a conversation with a name, whoever answered it."""
        asked = tenant, salt, session
        found = [self.own_last_turn(*asked), *await self._ask(OtherProcesses.own_last_turn, *asked)]
        return max((each for each in found if each is not None), key=lambda each: each.ended, default=None)

    def own_last_turn(self, tenant: str, salt: str, session: str) -> Turn | None:
        assert self._client.turns is not None
        return self._client.turns.find(tenant, salt, session)

    async def recent(self, limit: int) -> list[dict[str, Any]]:
        """The result of recent_answers in each of the other processes."""
        return await self._ask(OtherProcesses.own_recent, limit)

    def own_recent(self, limit: int) -> dict[str, Any]:
        return recent_answers(self._log, self._client.history, min(limit, MOST_ANSWERS))

    async def cancel(self, request_id: str, tenant: str | None) -> int:
        """As EngineClient.cancel, of their requests."""
        return sum(await self._ask(OtherProcesses.own_cancelled, request_id, tenant))

    def own_cancelled(self, request_id: str, tenant: str | None) -> int:
        return self._client.cancel(request_id, tenant)

    async def _ask(self, method: Callable[..., Any], *given: object, topic: str = "") -> list[Any]:
        """What this method returns in each of the other processes, but None."""
        said = [] if self._remote is None else await self._remote.ask(topic or method.__qualname__, pack(given))
        return [form_of(method).result.decode(each) for each in said]

    def _inherited(self) -> list[Count]:
        inherited = None if self._remote is None else self._remote.inherited
        return lasting(summed.decode(inherited)) if inherited else []


def _caller(owner: str, *, admin: bool) -> dict[str, Any]:
    """The ASGI scope of such a tenant."""
    return {"tenant": Tenant(owner, b"", RateLimits(None, None), admin=admin)}
