"""Each planted fault is found by one of the simulation's first seeds."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.messages import LEADER
from quire.engine.common.types import EngineCoreRequest
from quire.server.durability import answer_pins, durable_request
from quire.server.durability.data_dir import Processes
from quire.server.durability.data_dir_rpc import DATA_DIR_TOPIC
from quire.server.durability.event_ids import EventIdWriter
from quire.server.durability.journal import Calls
from quire.server.durability.peers import Peers, RunFromThread
from quire.server.durability.progress import CallProgress
from quire.server.generation.resolved_request import AnswerIdentity, GenerationRequest
from quire.server.shared_capacity import BytesByOwner
from quire.server.store.database import Database
from quire.server.store.files import Files, StoredFile
from quire.server.store.response_store import Store
from tests.simulation.clients import Batching
from tests.simulation.clock import Gone
from tests.simulation.replicas import Replicas
from tests.simulation.server import Program, ServerProcess
from tests.simulation.several import SharedServer
from tests.simulation.test_simulation import simulate
from tests.tiers import runs_rest, slow

SEEDS = 1000 if runs_rest() else 150
FIRST_SEEDS = {"results_deleted_that_are_known": 880, "joining_process_registers_no_calls": 1290}
"""Where the search begins for faults that the first hundreds of seeds do not find; that search took a quarter of an
hour.
"""
Plant = Callable[[pytest.MonkeyPatch], None]


def no_rollback_of_commits(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def writing(self: Database, *sizes: BytesByOwner) -> Iterator[sqlite3.Connection]:
        with self.read_connection() as connection:
            connection.execute("begin immediate")
            for each in sizes:
                each.begin_transaction()
            try:
                yield connection
            except BaseException:
                connection.execute("rollback")
                for each in sizes:
                    each.revert()
                raise
            connection.execute("commit")
            for each in sizes:
                each.commit()

    patch.setattr(Database, "write_transaction", writing)


def background_answers_not_finished(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Store, "unfinished_responses", lambda self: [])


def duplicate_event(patch: pytest.MonkeyPatch) -> None:
    made = EventIdWriter.__init__

    def init(self: Any, writer: Any, spec: Any, seen: Sequence[int] = (), known: Any = None) -> None:
        made(self, writer, spec, [max(0, each - 1) for each in seen], known)

    patch.setattr(EventIdWriter, "__init__", init)


def replay_forgets_emitted_tokens(patch: pytest.MonkeyPatch) -> None:
    known = EngineClient.request

    def request(self: EngineClient, id: str) -> EngineCoreRequest:
        return msgspec.structs.replace(known(self, id), emitted_ids=[])

    patch.setattr(EngineClient, "request", request)


def resumed_answer_changes_seed(patch: pytest.MonkeyPatch) -> None:
    pinned = answer_pins.pin_identity

    def loose(resolved: GenerationRequest, fresh: AnswerIdentity, resumed: Any, **more: bool) -> AnswerIdentity:
        return replaced(pinned(resolved, fresh, resumed, **more), seed=fresh.seed)

    patch.setattr("quire.server.durability.durable_request.pin_identity", loose)


def resumed_answer_skips_token(patch: pytest.MonkeyPatch) -> None:
    known = durable_request.known_progress

    def less(earlier: CallProgress | None, num_choices: int, **more: bool) -> CallProgress:
        if earlier is not None:
            earlier = CallProgress([ids[1:] for ids in earlier.ids], earlier.cached, earlier.ends)
        return known(earlier, num_choices, **more)

    patch.setattr(durable_request, "known_progress", less)


def token_log_not_read(patch: pytest.MonkeyPatch) -> None:
    """After a kill and an upgrade a client has received more than the journal holds."""
    patch.setattr("quire.server.durability.journal.read_logged_tokens", lambda path: ())


def calls_not_journaled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Calls, "put", lambda self, owner, call, expires_at, process: True)


# Faults that the simulation found:


def ends_not_retried_on_full_disk(patch: pytest.MonkeyPatch) -> None:
    async def once(what: str, do: Callable[[], Any], given_up: Any = None) -> Any:
        return await do()

    patch.setattr("quire.server.pipeline.stored_response.retry_until_written", once)


def sizes_not_reverted(patch: pytest.MonkeyPatch) -> None:
    writing = Database.write_transaction
    patch.setattr(Database, "write_transaction", lambda self, *sizes: writing(self))


def silent_leader_ends_callers(patch: pytest.MonkeyPatch) -> None:
    """A silent leader ended each process's journal writes for good."""

    def asking(link: Any, from_thread: RunFromThread) -> Callable[[bytes], bytes]:
        loop = asyncio.get_running_loop()

        async def ask(body: bytes) -> bytes:
            (said,) = await link.ask(DATA_DIR_TOPIC, body, to=LEADER)
            return bytes(said)

        return lambda body: from_thread(ask(body), loop).result()

    patch.setattr("quire.server.durability.persistence.make_blocking_data_dir_call", asking)


# Faults of several API processes:


def ended_processes_not_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Processes, "remove_process", lambda self, process: None)


def no_takeover_by_peers(patch: pytest.MonkeyPatch) -> None:
    """The process that is asked for a call computes it while the process that began it still does."""

    async def ask(self: Any, process: str, topic: str, body: bytes) -> None:
        return None

    patch.setattr(Peers, "ask_peer", ask)


def taken_over_answer_is_empty(patch: pytest.MonkeyPatch) -> None:
    """Every client counts as disconnected."""

    async def left(self: Any) -> bool:
        return True

    patch.setattr("starlette.requests.Request.is_disconnected", left)


def stream_starts_without_journal(patch: pytest.MonkeyPatch) -> None:
    """A call to the journal's process that gets no answer is not retried."""
    patch.setattr("quire.server.durability.resumable_calls.StoreUnreachable", Gone)


def joining_process_registers_no_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Calls, "register_answering_process", lambda self, process, calls: None)


def file_registered_without_content(patch: pytest.MonkeyPatch) -> None:
    """The next owner of the data deleted a content that a replica was about to register."""
    insert = Files.insert_files

    def known(self: Any, connection: sqlite3.Connection, owner: str, files: Sequence[StoredFile]) -> None:
        for file in files:
            self.contents.content_path(file.id).touch()
        insert(self, connection, owner, files)

    patch.setattr(Files, "insert_files", known)
    patch.setattr("tests.simulation.test_simulation.KINDS", (Batching,))  # all kinds of clients take 1,400 seeds


def results_deleted_that_are_known(patch: pytest.MonkeyPatch) -> None:
    """A process that was stopped took a missing answer for a refusal."""
    patch.setattr("quire.server.durability.peers.CancelledError", Gone)
    patch.setattr("tests.simulation.test_simulation.KINDS", (Batching,))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (ended_processes_not_removed, SharedServer),
        (no_takeover_by_peers, SharedServer),
        (silent_leader_ends_callers, Replicas),
        (ended_processes_not_removed, Replicas),
        (stream_starts_without_journal, Replicas),
        *slow(
            (taken_over_answer_is_empty, Replicas),
            (silent_leader_ends_callers, SharedServer),
            (no_takeover_by_peers, Replicas),
            (joining_process_registers_no_calls, Replicas),
            (file_registered_without_content, Replicas),
            (results_deleted_that_are_known, Replicas),
        ),
    ],
)
def test_simulation_of_several_processes_finds_planted_fault(
    plant: Plant, kind: type[Any], tmp_path: Path, api_programs: Sequence[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    _assert_some_seed_fails(plant, tmp_path, api_programs, monkeypatch, kind)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "plant",
    [
        no_rollback_of_commits,
        background_answers_not_finished,
        duplicate_event,
        replay_forgets_emitted_tokens,
        resumed_answer_changes_seed,
        resumed_answer_skips_token,
        token_log_not_read,
        calls_not_journaled,
        *slow(ends_not_retried_on_full_disk, sizes_not_reverted),
    ],
)
def test_simulation_finds_planted_fault(
    plant: Plant, tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    _assert_some_seed_fails(plant, tmp_path, [program], monkeypatch)


def _assert_some_seed_fails(
    plant: Plant,
    tmp_path: Path,
    programs: Sequence[Program],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Any] = ServerProcess,
) -> None:
    plant(monkeypatch)
    first = FIRST_SEEDS.get(plant.__name__, 0)
    for seed in range(first, first + SEEDS):
        (folder := tmp_path / str(seed)).mkdir()
        try:
            simulate(seed, folder, programs, kind)
        except (Exception, BaseExceptionGroup) as error:
            print(f"seed {seed}: {error!r}")
            return
    pytest.fail(f"no seed from {first} to {first + SEEDS} finds it")
