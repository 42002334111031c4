"""With --api-server-count, each process counts a part of the metrics, and any process may be asked about another one's
request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.messages import LASTING
from quire.engine.client.shared_client import SharedClient
from quire.engine.prefix_misses.recent_turns import Turn
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.cache_diagnostics import PromptFingerprint, RecentPrompts
from quire.server.encoding import encode_json, encode_msgpack, method_call_codec, method_handler
from quire.server.observe import metric_sums
from quire.server.observe.http_metrics import HttpMetrics, without_process_gauges
from quire.server.observe.metric_sums import PeerSample
from quire.server.observe.metrics import Metrics
from quire.server.observe.prefix_report import DecodeTokens, conversation_turns, latest_turns_oldest_first
from quire.server.observe.recent_answers import MAX_ANSWERS, summarize_recent_answers
from quire.server.observe.request_explanation import explain_request
from quire.server.observe.request_log import RequestLog


class CrossProcessObserver:
    def __init__(
        self, client: EngineClient, metrics: Metrics, request_log: RequestLog, decode_tokens: DecodeTokens
    ) -> None:
        self._client = client
        self._decode_tokens = decode_tokens
        self._metrics = metrics
        self._request_log = request_log
        self.http_metrics: HttpMetrics | None = None
        self.recent_prompts: RecentPrompts | None = None
        """Like http_metrics, belongs to the server, not to one model."""
        self._hub = client.engine_core if isinstance(client.engine_core, SharedClient) else None
        if self._hub is not None:
            observer_class = CrossProcessObserver
            shared_methods = (
                observer_class.explain_own_request,
                observer_class.summarize_own_answers,
                observer_class.cancel_own_requests,
                observer_class.list_own_conversation_turns,
                observer_class.find_own_last_turn,
                observer_class.find_own_prompt,
            )
            for each in shared_methods:
                self._hub.answering.add(each.__qualname__, method_handler(self, each))
            self._hub.answering.add(LASTING, method_handler(self, observer_class.collect_own_samples))

    async def collect_peer_samples(self) -> list[PeerSample]:
        peer_samples = await self._call_peers(CrossProcessObserver.collect_own_samples, topic=LASTING)
        return [*self._ended_process_samples(), *chain.from_iterable(peer_samples)]

    def collect_own_samples(self) -> list[PeerSample]:
        http = [] if self.http_metrics is None else self.http_metrics.collect_samples()
        return [*self._metrics.collect_samples(), *http, *self._ended_process_samples()]

    async def explain_peer_request(self, name: str, tenant: Tenant) -> bytes | None:
        explanations = await self._call_peers(CrossProcessObserver.explain_own_request, name, tenant.name, tenant.admin)
        return explanations[0] if explanations else None

    def explain_own_request(self, name: str, owner: str, admin: bool) -> bytes | None:
        """Returns JSON; None if the request is unknown, or if the tenant is neither its owner nor an admin. Only the
        owner sees prompt content.
        """
        caller = _make_asgi_scope_for_tenant(owner, admin=admin)
        record = self._request_log.find_record(name, caller)
        if record is None:
            return None
        decode = self._decode_tokens if record.owner == owner else None
        return encode_json(
            explain_request(
                record, self._client.history, partial(self._request_log.may_see_sequence, caller=caller), decode
            )
        )

    async def collect_conversation_turns(self, conversation: str, tenant: Tenant) -> list[dict[str, Any]]:
        arguments = conversation, tenant.name, tenant.admin
        return latest_turns_oldest_first(
            [
                *self.list_own_conversation_turns(*arguments),
                *chain.from_iterable(
                    await self._call_peers(CrossProcessObserver.list_own_conversation_turns, *arguments)
                ),
            ]
        )

    def list_own_conversation_turns(self, conversation: str, owner: str, admin: bool) -> list[dict[str, Any]]:
        may_name = partial(self._request_log.may_see_sequence, caller=_make_asgi_scope_for_tenant(owner, admin=admin))
        return conversation_turns(self._request_log, self._client.history, conversation, may_name)

    async def find_last_turn(self, tenant: str, salt: str, session: str) -> Turn | None:
        arguments = tenant, salt, session
        turns_found = [
            self.find_own_last_turn(*arguments),
            *await self._call_peers(CrossProcessObserver.find_own_last_turn, *arguments),
        ]
        return max((each for each in turns_found if each is not None), key=lambda each: each.ended_at, default=None)

    def find_own_last_turn(self, tenant: str, salt: str, session: str) -> Turn | None:
        assert self._client.turns is not None
        return self._client.turns.find_session_turn(tenant, salt, session)

    async def find_peer_prompt(self, owner: str, salt: str, answer_id: str) -> PromptFingerprint | None:
        prompts = await self._call_peers(CrossProcessObserver.find_own_prompt, owner, salt, answer_id)
        return prompts[0] if prompts else None

    def find_own_prompt(self, owner: str, salt: str, answer_id: str) -> PromptFingerprint | None:
        return None if self.recent_prompts is None else self.recent_prompts.find_prompt(owner, salt, answer_id)

    async def collect_peer_answer_summaries(self, limit: int) -> list[dict[str, Any]]:
        return await self._call_peers(CrossProcessObserver.summarize_own_answers, limit)

    def summarize_own_answers(self, limit: int) -> dict[str, Any]:
        return summarize_recent_answers(self._request_log, self._client.history, min(limit, MAX_ANSWERS))

    async def cancel_requests_of_peers(self, request_id: str, tenant: str | None) -> int:
        return sum(await self._call_peers(CrossProcessObserver.cancel_own_requests, request_id, tenant))

    def cancel_own_requests(self, request_id: str, tenant: str | None) -> int:
        return self._client.cancel(request_id, tenant)

    async def _call_peers(self, method: Callable[..., Any], *arguments: object, topic: str = "") -> list[Any]:
        """Drops None results."""
        encoded_results = (
            [] if self._hub is None else await self._hub.ask(topic or method.__qualname__, encode_msgpack(arguments))
        )
        return [method_call_codec(method).result_decoder.decode(each) for each in encoded_results]

    def _ended_process_samples(self) -> list[PeerSample]:
        inherited = None if self._hub is None else self._hub.inherited
        return without_process_gauges(metric_sums.decode_samples(inherited)) if inherited else []


def _make_asgi_scope_for_tenant(owner: str, *, admin: bool) -> dict[str, Any]:
    return {"tenant": Tenant(owner, b"", RateLimits(None, None), admin=admin)}
