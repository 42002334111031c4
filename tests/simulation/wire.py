"""Sockets between the processes of one server. Messages arrive late but in order; when a process ends, the last ones in
flight are lost.
"""

from __future__ import annotations

import asyncio
import random
from itertools import count

import zmq

from tests.simulation.clock import PROCESS


class Network:
    """One per simulation."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.numbers = count()
        """Of replicas, whose names are never used twice."""
        self.hubs: dict[str, SimulatedWire] = {}
        """By address."""
        self.late_until: dict[bytes, float] = {}
        """By the identity of an API process: before then nothing reaches it, nor comes from it."""


class SimulatedWire:
    """Replaces Wire."""

    def __init__(self, network: Network, kind: int, *, linger_ms: int = 0, identity: bytes = b"") -> None:
        self._network = network
        self._kind = kind
        self._identity = identity
        self._process = PROCESS.get()
        self._inbox: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self._hub = ""
        self._known: dict[bytes, SimulatedWire] = {}
        """Of a hub, by identity: those who have written to it."""
        self._arrives: dict[SimulatedWire, float] = {}
        self._broken: set[SimulatedWire] = set()
        """Nothing more comes there: something that was sent before has been lost."""
        self._closed = False

    @property
    def _gone(self) -> bool:
        return self._closed or (self._process is not None and self._process.dead)

    def bind(self, address: str) -> None:
        self._network.hubs[address] = self

    def connect(self, address: str) -> None:
        self._hub = address

    def close(self) -> None:
        self._closed = True

    def send(self, *frames: bytes) -> None:
        to = self._known.get(frames[0]) if self._kind == zmq.ROUTER else self._network.hubs.get(self._hub)
        if to is None or self._gone:
            return
        api = to._identity or self._identity
        now = asyncio.get_running_loop().time()
        late = self._network.late_until.get(api, 0.0)
        comes = max(now + self._network.rng.choice((0.0, 0.0001, 0.002, 0.02)), late)
        self._arrives[to] = max(self._arrives.get(to, 0.0) + 1e-6, comes)
        asyncio.get_running_loop().call_at(self._arrives[to], self._arrive, to, frames[-1])

    def _arrive(self, to: SimulatedWire, content: bytes) -> None:
        dead = self._process is not None and self._process.dead
        if to._gone or to in self._broken:
            return
        if dead and self._network.rng.random() < 0.5:
            self._broken.add(to)
            return
        if self._identity:
            to._known[self._identity] = self
        to._inbox.put_nowait([self._identity, content] if self._identity else [content])

    async def receive(self) -> list[bytes]:
        return await self._inbox.get()
