"""Worker nodes as threads of the test's process: the same store, messages and collectives, without the seconds that a
process takes to start.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.worker.ranks.follower import open_store_channel, run_follower
from quire.engine.worker.ranks.remote_ranks import SILENCE_TIMEOUT, NodeRendezvous, RemoteRank
from quire.engine.worker_node import NodeHeartbeat, WorkerNode
from tests.e2e.server import free_port

Nodes = Callable[..., dict[str, Any]]


class _Running:
    pid = os.getpid()
    returncode = None

    def poll(self) -> int | None:
        return None


class ThreadMember(WorkerNode):
    """A worker node whose ranks are threads."""

    def _run_rank(self, place: int) -> None:
        process: Any = _Running()
        with tempfile.TemporaryDirectory() as copies:
            if (joined := self._join_engine(place, process, copies)) is None:
                return
            life = NodeHeartbeat(joined)
            life.report_exit(run_follower(*open_store_channel(joined), joined))


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Starts all nodes but the first; returns the settings of an engine on the first."""
    members: list[ThreadMember] = []
    threads: list[threading.Thread] = []

    def start(model: str, ranks: int, count: int = 2, **settings: Any) -> dict[str, Any]:
        told = {"tensor_parallel_size": ranks, "nnodes": count, "master_port": free_port(), "nodes_timeout": 60.0}
        for node in range(1, count):
            config = EngineConfig(model=model, **told | {"node_rank": node} | settings)
            members.append(ThreadMember(config))
            for place in range(config.local_world_size):
                threads.append(threading.Thread(target=members[-1].keep_rank_running, args=(place,), daemon=True))
                threads[-1].start()
        return told

    yield start
    for member in members:
        member.stop_event.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank does not end"


def member_config(told: dict[str, Any], **settings: Any) -> EngineConfig:
    return EngineConfig(model=DEMO_MODEL, **told | {"node_rank": 1} | settings)


def told() -> dict[str, Any]:
    return {"tensor_parallel_size": 2, "nnodes": 2, "master_port": free_port(), "nodes_timeout": 60.0}


def gathering(
    settings: dict[str, Any], silence: timedelta = SILENCE_TIMEOUT
) -> tuple[NodeRendezvous, threading.Thread, list[RemoteRank]]:
    """Wait for ranks in a thread. Returns the rendezvous, the thread, and the list of ranks that it fills."""
    found: list[RemoteRank] = []
    made = NodeRendezvous(EngineConfig(model=DEMO_MODEL, **settings), silence)
    thread = threading.Thread(target=lambda: found.extend(made.wait_for_ranks()), daemon=True)
    thread.start()
    return made, thread, found
