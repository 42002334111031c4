"""Which replicas were sent which prefixes of prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

ReplicaName = TypeVar("ReplicaName", bound=Hashable)


class SentPrefixes(Generic[ReplicaName]):
    """Prefixes are hashes, of a prompt's first block, its first two, and so on."""

    def __init__(self, max_imbalance: int, capacity: int) -> None:
        """max_imbalance: how many open requests more than another replica one may have that is preferred. capacity: how
        many prefixes are remembered; those that were not sent for the longest time are forgotten."""
        self._max_imbalance = max_imbalance
        self._capacity = capacity
        self._replicas: OrderedDict[int, set[ReplicaName]] = OrderedDict()

    def note(self, prefix: Iterable[int], replica: ReplicaName) -> None:
        """A prompt was sent to this replica."""
        for each in prefix:
            self._replicas.setdefault(each, set()).add(replica)
            self._replicas.move_to_end(each)
        while len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)

    def preferred(self, prefix: tuple[int, ...], loads: Mapping[ReplicaName, int]) -> set[ReplicaName]:
        """Of the replicas in `loads`, by open requests, those that were sent the longest prefix and are not loaded too
        much; none where all that were sent any are."""
        most = min(loads.values(), default=0) + self._max_imbalance
        open_to_more = {replica for replica, load in loads.items() if load <= most}
        known = (self._replicas.get(each, set()) & open_to_more for each in reversed(prefix))
        return next((found for found in known if found), set())
