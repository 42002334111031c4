"""The parts of deploy/ray's journal that need no Ray: the owner of --data-dir is replaced while replicas continue."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.ray.call import Call as Sent
from deploy.ray.call import Head
from deploy.ray.link import JournalLink
from deploy.ray.members import Members
from deploy.ray.resume import KeptStream
from quire.engine.common.errors import ConfigError, Overloaded
from quire.server.durability.data_dir import DataDir, ProcessStatus
from quire.server.durability.data_dir_rpc import remote_data_dir
from quire.server.durability.journal import JournaledCall, PinnedReplayFields, ProgressUpdate
from quire.server.durability.peers import Peers, make_blocking_data_dir_call
from quire.server.durability.persistence import STATUS_TOPIC
from quire.server.durability.progress import CallProgress
from quire.server.durability.write_ahead_log import WriteAheadLog

A = "a"
CALL = JournaledCall(
    path="/v1/completions", body=b"{}", pins=PinnedReplayFields("s", "", 1, 7), progress=CallProgress([[]], [], [None])
)


class Cluster:
    """Replicas by name, and the Members object that they call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.living: set[str] = set()
        self.links: dict[str, JournalLink] = {}
        self.lost = 0
        """Number of next answers that are lost."""
        self.replace()

    def replace(self) -> None:
        self.members = Members(self.folder, 1 << 20, lambda: self.living)

    async def call(self, method: str, *given: Any) -> Any:
        said = await getattr(self.members, method)(*given)
        if self.lost and method == "ask":
            self.lost -= 1
            raise Overloaded("it ended")
        return said

    async def replica(self, name: str, standing: ProcessStatus) -> DataDir:
        self.living.add(name)
        link = self.links[name] = JournalLink(name, self.call)

        async def told(_: bytes) -> bytes:
            return msgspec.msgpack.encode(standing)

        link.answering.add(STATUS_TOPIC, told)
        await link.begin(self.folder)
        return remote_data_dir(self.folder, make_blocking_data_dir_call(link))

    async def end(self) -> None:
        for each in self.links.values():
            await each.close()
        await self.members.close()


async def run_in_thread(what: Any, *given: Any, **named: Any) -> Any:
    return await asyncio.wait_for(asyncio.to_thread(what, *given, **named), 30)


@pytest.mark.slow
async def test_replaced_journal_learns_running_calls_and_leader(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        one = await cluster.replica("one", ProcessStatus([(A, "s")], leads=True))
        two = await cluster.replica("two", ProcessStatus())
        tail = WriteAheadLog(tmp_path, "one")
        assert (await run_in_thread(one.processes.exchange_status, "one", {})).leads
        assert not (await run_in_thread(two.processes.exchange_status, "two", {})).leads
        assert await run_in_thread(one.calls.put, A, CALL, 9e9, "one")
        tail.log_tokens(tail.log_call(A, "s"), 0, 0, [1, 2, 3], None)
        await cluster.members.close()
        cluster.replace()
        assert await run_in_thread(two.calls.answering_process, A, "s") == "one", (
            "nobody is answered before all have joined"
        )
        assert not (await run_in_thread(two.processes.exchange_status, "two", {})).leads
        assert (tmp_path / "tail-one").exists(), "it goes on"
        await run_in_thread(
            one.calls.update_progress, [ProgressUpdate(A, "s", CallProgress([[1, 2]], [], [None]), 9e9, False)], "one"
        )
        cluster.living.remove("one")
        while await run_in_thread(two.calls.answering_process, A, "s") is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert (await run_in_thread(two.calls.find, A, "s")).progress.ids == [[1, 2, 3]]
        assert (await run_in_thread(two.processes.exchange_status, "two", {})).leads
    finally:
        await cluster.end()


async def test_replicas_ask_peers_through_journal(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        data = await cluster.replica("one", ProcessStatus())
        await cluster.replica("two", ProcessStatus())
        peers = Peers(cluster.links["one"], data.calls)

        async def upper(body: bytes) -> bytes | None:
            return body.upper() if body else await asyncio.sleep(60)

        cluster.links["two"].answering.add("topic", upper)
        assert await peers.ask_peer("two", "topic", b"said") == b"SAID"
        assert await peers.ask_peer("two", "another topic", b"said") is None
        assert await peers.ask_peer("nobody", "topic", b"said") is None
        waiting = asyncio.create_task(peers.ask_peer("two", "topic", b""))
        await asyncio.sleep(0.05)
        cluster.living.remove("two")
        assert await asyncio.wait_for(waiting, 5) is None, "it ended before it said anything"
    finally:
        await cluster.end()


async def test_lost_journal_answer_raises_operational_error(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        data = await cluster.replica("one", ProcessStatus())
        cluster.lost = 1
        with pytest.raises(sqlite3.OperationalError, match="ended"):
            await run_in_thread(data.calls.try_claim_call, A, "s", "one", 1)
        assert not await run_in_thread(data.calls.try_claim_call, A, "s", "one", 2), "the one before was made"
    finally:
        await cluster.end()


async def test_replica_with_other_data_dir_is_rejected(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        cluster.living.add("one")
        with pytest.raises(ConfigError, match="is not the folder that the journal has"):
            await JournalLink("one", cluster.call).begin(tmp_path / "files")
    finally:
        await cluster.end()


def test_kept_stream_resumes_after_last_event() -> None:
    sent = Sent("POST", "/v1/messages", b"", [(b"authorization", b"k"), (b"content-length", b"2")], None, b"{}")
    stream = KeptStream(sent)
    assert stream.call is None
    stream.begins(Head(200, [(b"content-type", b"text/event-stream"), (b"x-stream-id", b"msg_1")]))
    rest = stream.call
    assert rest is not None
    assert (rest.method, rest.path, rest.body) == ("GET", "/v1/streams/msg_1", b"")
    assert rest.headers == [(b"authorization", b"k")]
    events = b'id: msg_1:1.2.0\ndata: {"text": "id: msg_1:9.9.9"}\n\nid: msg_1:1.3.0\ndata: {}\n\n: ping\n\n'
    assert stream.note(events) == events
    rest = stream.call
    assert rest is not None
    assert rest.headers[1:] == [(b"last-event-id", b"msg_1:1.3.0")]
