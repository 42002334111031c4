"""Data that outlives the process (--data-dir). If there are several API processes, one of them leads: it runs batches,
and resumes the work of processes that have ended.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import urlencode

import msgspec
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from quire.engine.client.engine_client import EngineClient
from quire.engine.common.errors import Overloaded, QuireError
from quire.server.access.tenants import Tenants
from quire.server.batches.asgi_client import ASGIClient
from quire.server.batches.runner import BatchRunner
from quire.server.config import ServerConfig
from quire.server.durability.data_dir import DataDir, ProcessStatus, open_data_dir
from quire.server.durability.data_dir_rpc import remote_data_dir
from quire.server.durability.peers import PeerLink, Peers, RunFromThread, make_blocking_data_dir_call
from quire.server.durability.resumable_calls import RESUMED_SCOPE_KEY, Claim, ResumableCalls
from quire.server.durability.write_ahead_log import WriteAheadLog
from quire.server.store.data_dir_status import OPEN_BATCHES_KEY, DataDirStatus
from quire.server.store.database import SQLiteConnect
from quire.server.store.response_store import Store
from quire.server.store.sweeper import SECONDS_PER_DAY
from quire.server.store.write_retry import RETRY_SECONDS

log = logging.getLogger("quire.server")
STATUS_TOPIC = "standing"
"""Each process answers this topic with its ProcessStatus as msgpack."""
_MAX_CONCURRENT_RESTARTS = 8
_RETRYABLE_STATUSES = (HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_POLL_SECONDS = 0.5
_SWEEP_SECONDS = 0.5
_SWEEP_PAUSE_SECONDS = 0.02
"""Pause between sweeps while more is due, so that others can use the disk."""
_POLL_ALONE_SECONDS = 2.0
"""A single process only checks whether the disk can be written."""


@dataclass(slots=True)
class Persistence:
    data_dir: DataDir
    batch_runner: BatchRunner
    resumable_calls: ResumableCalls
    peers: Peers
    data_dir_status: DataDirStatus = field(init=False)
    unfinished_responses: set[tuple[str, str]] = field(default_factory=set)

    def schedule_response_restart(self, owner: str, id: str) -> None:
        """If this process ends first, another process restarts it."""
        self.unfinished_responses.add((owner, id))

    async def refresh_status(self) -> DataDirStatus:
        counts = {
            **self.batch_runner.result_counts,
            OPEN_BATCHES_KEY: self.batch_runner.num_running_batches,
            "resumed": self.resumable_calls.num_resumed,
        }
        self.data_dir_status = await asyncio.to_thread(
            self.data_dir.processes.exchange_status, self.peers.process_name, counts
        )
        return self.data_dir_status

    @property
    def store(self) -> Store:
        return self.data_dir.store


def open_configured_data_dir(
    config: ServerConfig,
    link: PeerLink | None,
    *,
    connect: SQLiteConnect | None = None,
    from_thread: RunFromThread = asyncio.run_coroutine_threadsafe,
) -> DataDir | None:
    """`link` leads to the process that owns the data; None: this process owns it. Raises ConfigError."""
    if config.data_dir is None:
        return None
    if link is not None:
        return remote_data_dir(config.data_dir, make_blocking_data_dir_call(link, from_thread))
    retention = config.response_retention_days * SECONDS_PER_DAY
    return open_data_dir(
        config.data_dir, int(config.max_stored_size * 2**30), retention_seconds=retention, connect=connect
    )


@asynccontextmanager
async def open_persistence(
    data: DataDir,
    app: ASGIApp,
    tenants: Tenants,
    config: ServerConfig,
    clients: Callable[[], list[EngineClient]],
    peers: Peers,
) -> AsyncIterator[Persistence]:
    """At the end, batches and streams stop where they are, and the next process continues them."""
    batches = BatchRunner(app, data.batches, data.files, data.contents, tenants, config, clients)
    streams = ResumableCalls(data.calls, config.stream_grace, peers, _open_write_ahead_log(data, peers.process_name))
    persistence = Persistence(data, batches, streams, peers)

    async def report_status(_: bytes) -> bytes:
        return msgspec.msgpack.encode(ProcessStatus(streams.running_call_keys, batches.is_leader))

    peers.register_handler(STATUS_TOPIC, report_status)
    try:
        await persistence.refresh_status()
        yield persistence
    finally:
        await batches.stop_batches()
        await streams.close()


def _open_write_ahead_log(data: DataDir, process: str) -> WriteAheadLog | None:
    try:
        return WriteAheadLog(data.contents.folder.parent, process)
    except OSError as error:
        log.error("a kill may lose the last second of streams: data_dir has no room for the journal's tail: %s", error)
        return None


async def resume_unfinished_work_forever(persistence: Persistence, app: ASGIApp, tenants: Tenants) -> None:
    """The application must already answer requests."""
    restart_slots, restarted = asyncio.Semaphore(_MAX_CONCURRENT_RESTARTS), set[tuple[str, str]]()

    has_recovered = False

    async def restart_response(owner: str, id: str) -> None:
        async with restart_slots:
            try:
                return await _restart_response(persistence, app, tenants, owner, id)
            except (sqlite3.OperationalError, OSError, HTTPException, Overloaded) as error:
                log.error("the response %s cannot be regenerated now; retrying: %s", id, error)
            except Exception:  # one response must not affect others
                return log.exception("the response %s cannot be regenerated now; the next start tries again", id)
        await asyncio.sleep(RETRY_SECONDS)
        persistence.unfinished_responses.add((owner, id))

    async with asyncio.TaskGroup() as group:
        group.create_task(_sweep_forever(persistence))
        while True:
            try:
                if (await persistence.refresh_status()).leads and not (has_recovered and persistence.peers.is_alone):
                    unfinished = await asyncio.to_thread(persistence.data_dir.processes.list_abandoned_responses)
                    persistence.unfinished_responses |= set(unfinished) - restarted
                    await persistence.batch_runner.start_open_batches()
                    has_recovered = True
            except (sqlite3.OperationalError, OSError, QuireError) as error:
                log.error("data_dir cannot be read: %s", error)
            due, persistence.unfinished_responses = persistence.unfinished_responses, set()
            restarted |= due
            for each in due:
                group.create_task(restart_response(*each))
            await asyncio.sleep(_POLL_ALONE_SECONDS if has_recovered and persistence.peers.is_alone else _POLL_SECONDS)


async def _sweep_forever(persistence: Persistence) -> None:
    while True:
        more = False
        try:
            if persistence.data_dir_status.leads:
                more = await asyncio.to_thread(persistence.data_dir.processes.delete_due_data)
        except (sqlite3.OperationalError, OSError, QuireError) as error:
            log.error("nothing is deleted from data_dir now: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
        await asyncio.sleep(_SWEEP_PAUSE_SECONDS if more else _SWEEP_SECONDS)


async def _restart_response(persistence: Persistence, app: ASGIApp, tenants: Tenants, owner: str, id: str) -> None:
    """Raises Overloaded, HTTPException or the disk's error if it may restart later."""
    if (tenant := tenants.find_by_digest(owner)) is None:
        log.error("the response %s waits for its API key, which this server does not accept", id)
        return
    if (call := await persistence.resumable_calls.find_call(owner, id)) is not None:
        claims: list[Claim] = []
        try:
            scope_entries = {
                "tenant": tenant,
                RESUMED_SCOPE_KEY: await persistence.resumable_calls.prepare_resume(owner, call, (), claims),
            }
            path = f"{call.path}?{urlencode({'model': call.pins.model})}"
            answer = await ASGIClient(app, scope_entries, asyncio.Event()).post_with_retries(path, call.body)
        finally:
            persistence.resumable_calls.release_claims(claims)
        assert answer is not None, "nobody leaves it"
        if answer.status == HTTPStatus.OK:
            return
        if answer.status in _RETRYABLE_STATUSES:
            raise Overloaded(f"it was answered {answer.status}")
        log.error("the response %s cannot be regenerated: %s", id, answer.body.decode(errors="replace")[:500])
    await asyncio.to_thread(persistence.store.mark_response_failed, owner, id)
