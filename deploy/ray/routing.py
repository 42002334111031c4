"""Serve's request router: prefers the replica that computed the longest prefix of the prompt."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.ray.prefixes import SentPrefixes


class PrefixRouter(RequestRouter):
    """Falls back to the least loaded replica for new prompts and if preferred replicas are overloaded."""

    def initialize_state(self, max_imbalance: int = 16, capacity: int = 100_000) -> None:
        """Called by Serve with request_router_kwargs; see SentPrefixes."""
        self._sent: SentPrefixes[ReplicaID] = SentPrefixes(max_imbalance, capacity)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Serve takes the least loaded replica of the first list that has room."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # otherwise Serve retries at once when all are full
        loads = {each.replica_id: self.replica_queue_len_cache.get(each.replica_id) or 0 for each in candidate_replicas}
        preferred = self._sent.preferred(_prefix(pending_request), loads)
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))  # Serve takes the first among equals
        return [[each for each in shuffled if each.replica_id in preferred], shuffled]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._sent.note(_prefix(pending_request), replica_id)


def _prefix(pending_request: PendingRequest) -> tuple[int, ...]:
    prefix: tuple[int, ...] = getattr(pending_request.args[0], "prefix", ()) if pending_request.args else ()
    return prefix
