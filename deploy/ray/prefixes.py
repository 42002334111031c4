from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

ReplicaName = TypeVar("ReplicaName", bound=Hashable)


class SentPrefixes(Generic[ReplicaName]):
    """Which replicas were sent which prefixes: hashes of a prompt's first block, first two, and so on."""

    def __init__(self, max_imbalance: int, capacity: int) -> None:
        """`max_imbalance`: open requests that a preferred replica may have more than another. `capacity`: prefixes
        remembered, least recently sent dropped first.
        """
        self._max_imbalance = max_imbalance
        self._capacity = capacity
        self._replicas: OrderedDict[int, set[ReplicaName]] = OrderedDict()

    def note(self, prefix: Iterable[int], replica: ReplicaName) -> None:
        for each in prefix:
            self._replicas.setdefault(each, set()).add(replica)
            self._replicas.move_to_end(each)
        while len(self._replicas) > self._capacity:
            self._replicas.popitem(last=False)

    def preferred(self, prefix: tuple[int, ...], loads: Mapping[ReplicaName, int]) -> set[ReplicaName]:
        """The replicas with the longest sent prefix that are not overloaded; empty if there are none. `loads`: open
        requests.
        """
        most = min(loads.values(), default=0) + self._max_imbalance
        open_to_more = {replica for replica, load in loads.items() if load <= most}
        known = (self._replicas.get(each, set()) & open_to_more for each in reversed(prefix))
        return next((found for found in known if found), set())
