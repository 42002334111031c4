"""Calls between API processes, through a real leader."""

from __future__ import annotations

from pathlib import Path

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.shared_client import SharedClient
from quire.server.access.rate_limits import RateLimits
from quire.server.access.tenants import Tenant
from quire.server.cache_diagnostics import RecentPrompts, make_fingerprint
from quire.server.durability.background import Background
from quire.server.durability.peers import Peers
from quire.server.observe.cross_process import CrossProcessObserver
from quire.server.observe.metrics import Metrics
from quire.server.observe.request_log import RequestLog
from tests.engine.client.test_api_server_leader import request, shared, until


def _open_observer(client: EngineClient) -> CrossProcessObserver:
    """Register all methods that API processes call in each other, as their start does."""
    assert isinstance(client.engine_core, SharedClient)
    others = CrossProcessObserver(client, Metrics(client, "m", 64, {}), RequestLog(9), lambda ids: "")
    others.recent_prompts = RecentPrompts()
    Background(Peers(client.engine_core, None))
    return others


async def test_peer_calls_return_answers_and_leave_processes_alive(tmp_path: Path) -> None:
    async with shared(tmp_path, step_seconds=0.01) as server:
        (one, _), (peer, two) = ((_open_observer(client), client) for client in server.clients)
        stream = two.submit([request("a-0", tokens=400, tenant="x"), request("a-1", tokens=400, tenant="x")], "a")
        await until(lambda: len(server.engine.running) == 2)
        assert await one.cancel_requests_of_peers("unknown", None) == 0
        assert await one.cancel_requests_of_peers("a", "y") == 0, "another key's"
        assert await one.cancel_requests_of_peers("a-0", None) == 1
        assert await one.cancel_requests_of_peers("a", "x") == 1
        await until(lambda: sorted(server.engine.aborted) == ["a-0", "a-1"])
        stream.close()
        caller = Tenant("x", b"", RateLimits(None, None), admin=True)
        assert await one.collect_peer_answer_summaries(5) != []
        assert await one.collect_peer_samples() != []
        assert await one.explain_peer_request("a", caller) is None
        assert await one.collect_conversation_turns("a", caller) == []
        assert await one.find_last_turn("x", "", "a") is None
        fingerprint = make_fingerprint({"tools": []}, ["Hi"], list(range(40)), ())
        assert peer.recent_prompts is not None
        peer.recent_prompts.add_prompt("x", "salt", "msg_a", fingerprint)
        assert await one.find_peer_prompt("x", "salt", "msg_a") == fingerprint
        assert await one.find_peer_prompt("y", "salt", "msg_a") is None
        assert await peer.find_peer_prompt("x", "salt", "msg_a") is None, "it is no peer's"
        assert all(client.alive for client in server.clients)
