"""Answers each batch line exactly once, at the lowest priority, whatever crashes. A result is stored before the next
line takes its slot. After a restart, lines without a result start again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from pathlib import Path

from msgspec.structs import replace as changed
from starlette.types import ASGIApp

from quire.engine.client.engine_client import EngineClient
from quire.engine.common import clock
from quire.engine.common.errors import InvalidRequest, RateLimited, RequestNotFound
from quire.server.access.fair_semaphore import FairSemaphore
from quire.server.access.gateway_headers import PRIORITY_SCOPE_KEY
from quire.server.access.tenants import Tenant, Tenants
from quire.server.batches.asgi_client import ASGIClient
from quire.server.batches.batch_lines import encode_answer_line, encode_error_line, parse_line
from quire.server.batches.input_file import read_batch_lines
from quire.server.batches.output_files import finish_batch
from quire.server.batches.pacer import BATCH_TENANT_SUFFIX, BatchPacer
from quire.server.config import ServerConfig
from quire.server.shared_capacity import SharedCapacity
from quire.server.store.batches import (
    TERMINAL_STATUSES,
    Batch,
    BatchError,
    Batches,
    BatchLine,
    LineResult,
    with_batch_status,
)
from quire.server.store.files import FileContents, Files
from quire.server.store.write_retry import Result, retry_until_written

log = logging.getLogger("quire.server")
BATCH_PRIORITY = 1 << 20
"""Smaller numbers go first; the default of other requests is 0."""
MAX_OPEN_BATCHES = 64
MAX_UPLOADS = 16
"""Concurrent uploads of all keys together."""
_SLOT_DIVISOR = 4
_LINES_PER_CHECK = 2
"""Lines that are started between two pauses, because each start blocks the event loop for some milliseconds."""
_CHECK_SECONDS = 0.005
_READ_AHEAD_LINES = 64
_SWEEP_SECONDS = 600.0
_EXPIRED_FILES_PER_READ = 100


class BatchRunner:
    """Answers batches only in the leading API process. Other processes read and write stored batches."""

    def __init__(
        self,
        app: ASGIApp,
        batches: Batches,
        files: Files,
        contents: FileContents,
        tenants: Tenants,
        config: ServerConfig,
        clients: Callable[[], list[EngineClient]],
    ) -> None:
        self._app = app
        self.batches = batches
        self.files = files
        self.contents = contents
        self.uploads = SharedCapacity(MAX_UPLOADS)
        self._tenants = tenants
        self._config = config
        self._pacer = BatchPacer(clients)
        self._line_slots = FairSemaphore(max(1, config.max_running_requests // _SLOT_DIVISOR))
        self._read_slots = FairSemaphore(1)  # one at a time, because threads compete with the event loop
        self._cancel_events: dict[str, asyncio.Event] = {}
        self.result_counts = {"completed": 0, "failed": 0}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_leader = False
        self._closing = False

    @property
    def num_running_batches(self) -> int:
        return len(self._cancel_events)

    async def start_open_batches(self) -> None:
        """Also cancels running batches that other processes were asked to cancel."""
        if not self.is_leader:
            self.is_leader = True
            self._track_task(asyncio.create_task(self._delete_expired_files()))
        for owner, batch in await asyncio.to_thread(self.batches.list_open_batches):
            if (cancelled := self._cancel_events.get(batch.id)) is None:
                self._start_batch(owner, batch)
            elif batch.status == "cancelling":
                cancelled.set()

    async def stop_batches(self) -> None:
        self._closing = True
        for cancelled in self._cancel_events.values():
            cancelled.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def is_file_in_use(self, file_id: str, owner: str) -> bool:
        """Blocks; call it in a thread."""
        return self.batches.is_file_in_use(owner, file_id)

    async def add_batch(self, owner: str, batch: Batch) -> None:
        """Raises RateLimited."""
        if not await asyncio.to_thread(self.batches.add, owner, batch, MAX_OPEN_BATCHES):
            raise RateLimited(f"{MAX_OPEN_BATCHES} batches have not ended yet. Please try again later", headers={})
        if self.is_leader:
            self._start_batch(owner, batch)

    async def cancel_batch(self, owner: str, id: str) -> Batch:
        """Results that exist are kept. Raises RequestNotFound, and InvalidRequest if the batch has ended or is
        finalizing.
        """
        batch = await asyncio.to_thread(self.batches.cancel, owner, id)
        if batch is None:
            raise RequestNotFound(f"No batch `{id}` is known here", param="batch_id")
        if (cancelled := self._cancel_events.get(id)) is not None:
            cancelled.set()
        return batch

    def _start_batch(self, owner: str, batch: Batch) -> None:
        if batch.id in self._cancel_events or self._closing:
            return
        self._cancel_events[batch.id] = asyncio.Event()
        self._track_task(asyncio.create_task(self._run_batch(owner, batch)))

    def _track_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_batch(self, owner: str, batch: Batch) -> None:
        try:
            if batch.status == "validating":
                await self._import_input_file(owner, batch)
            if (now := await self._current_batch(owner, batch.id)).status == "in_progress":
                await self._answer_batch_lines(owner, now)
            if (
                not self._closing
                and (now := await self._current_batch(owner, batch.id)).status not in TERMINAL_STATUSES
            ):
                await self._retry_until_written(lambda: finish_batch(self.batches, self.contents, owner, now))
        except Exception:
            log.exception("the batch %s stopped; the next start resumes it", batch.id)
        finally:
            del self._cancel_events[batch.id]

    async def _current_batch(self, owner: str, id: str) -> Batch:
        batch = await asyncio.to_thread(self.batches.find, owner, id)
        assert batch is not None, "unfinished ones are kept"
        return batch

    async def _import_input_file(self, owner: str, batch: Batch) -> None:
        max_bytes = int(self._config.max_body_size * 2**20)
        try:
            path = self.contents.content_path(batch.input_file_id)
            async with self._read_slots.hold_slot(owner):
                lines, errors = await asyncio.to_thread(read_batch_lines, path, batch.endpoint, max_bytes)
        except OSError as error:
            lines, errors = [], [BatchError("file_lost", f"The input file cannot be read: {error.strerror}")]
        updated_batch = changed(
            with_batch_status(batch, "failed" if errors else "in_progress"), errors=tuple(errors), total=len(lines)
        )
        await self._retry_until_written(lambda: self.batches.store_lines_and_batch(owner, updated_batch, lines))

    async def _answer_batch_lines(self, owner: str, batch: Batch) -> None:
        cancelled, seconds_left = self._cancel_events[batch.id], max(0.0, batch.expires_at - clock.time())
        expire = asyncio.get_running_loop().call_later(seconds_left, cancelled.set)
        try:
            if (tenant := self._tenants.find_by_digest(owner)) is None:
                log.error("the batch %s waits for its API key, which this server does not accept", batch.id)
                await cancelled.wait()
            else:
                extra_scope = {"tenant": self._derive_batch_tenant(tenant), PRIORITY_SCOPE_KEY: BATCH_PRIORITY}
                await self._answer_lines(ASGIClient(self._app, extra_scope, cancelled), owner, batch, cancelled)
        finally:
            expire.cancel()
        if not self._closing:
            await self._retry_until_written(partial(self.batches.mark_finalizing, owner, batch.id))

    def _derive_batch_tenant(self, tenant: Tenant) -> Tenant:
        """A separate share of the engine and separate rate limits prevent batches from slowing down the tenant's other
        requests.
        """
        return replace(tenant, name=f"{tenant.name}{BATCH_TENANT_SUFFIX}", limits=tenant.limits.with_full_buckets())

    async def _answer_lines(self, client: ASGIClient, owner: str, batch: Batch, cancelled: asyncio.Event) -> None:
        position, running_tasks = -1, set[asyncio.Task[None]]()
        try:
            while lines := await self._retry_until_written(
                partial(self.batches.list_unanswered_lines, batch.id, position, _READ_AHEAD_LINES)
            ):
                for number, line in enumerate(lines):
                    await self._line_slots.acquire_slot(owner)
                    if number % _LINES_PER_CHECK == 0:
                        await asyncio.sleep(_CHECK_SECONDS)
                    while self._pacer.must_wait(len(running_tasks)) and not cancelled.is_set():  # noqa: ASYNC110 - others change it
                        await asyncio.sleep(_CHECK_SECONDS)
                    if cancelled.is_set():
                        self._line_slots.release_slot(owner)
                        return
                    self._pacer.record_line_start()
                    running_tasks.add(task := asyncio.create_task(self._answer_line(client, batch, line)))
                    task.add_done_callback(running_tasks.discard)
                    task.add_done_callback(lambda _: self._line_slots.release_slot(owner))
                    position = line.position
        finally:
            await asyncio.gather(*running_tasks)

    async def _answer_line(self, client: ASGIClient, batch: Batch, line: BatchLine) -> None:
        try:
            content = await asyncio.to_thread(_read_line_bytes, self.contents.content_path(batch.input_file_id), line)
            job = parse_line(content)
        except (OSError, InvalidRequest) as error:
            result = encode_error_line(line.custom_id, "file_lost", f"The input file can no longer be read: {error}")
            await self._store_result(batch, LineResult(line.position, failed=True, line=result))
            return
        if (response := await client.post_with_retries(job.url, job.body)) is not None:
            id, status = response.headers.get("x-request-id", ""), response.status
            result = encode_answer_line(line.custom_id, status, id, response.body)
            await self._store_result(batch, LineResult(line.position, status != HTTPStatus.OK, result))

    async def _store_result(self, batch: Batch, result: LineResult) -> None:
        await self._retry_until_written(partial(self.batches.put_result, batch.id, result))
        self.result_counts["failed" if result.failed else "completed"] += 1

    async def _retry_until_written(self, operation: Callable[[], Result]) -> Result:
        return await retry_until_written("batches wait", partial(asyncio.to_thread, operation))

    async def _delete_expired_files(self) -> None:
        after: tuple[int, str, str] | None = None
        while True:
            expired = await self._retry_until_written(
                partial(self.files.list_expired_files, after, _EXPIRED_FILES_PER_READ)
            )
            for after in expired:
                _, owner, id = after
                if not await self._retry_until_written(partial(self.is_file_in_use, id, owner)):
                    await self._retry_until_written(partial(self.files.delete, owner, id))
            if not expired:
                after = None
                await asyncio.sleep(_SWEEP_SECONDS)


def _read_line_bytes(path: Path, line: BatchLine) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), line.length, line.byte_offset)
