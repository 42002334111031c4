"""Answers the lines of batches behind everything else, until each has exactly one result, whatever ends meanwhile.

A line's result is in the database before another line takes its place. What had begun when the process ended begins
again at its next start; what had a result keeps it.
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

from quire.engine import clock
from quire.engine.errors import InvalidRequest, RateLimited, RequestNotFound
from quire.engine.link.client import EngineClient
from quire.server.access.gateways import PRIORITY
from quire.server.access.tenants import Tenant, Tenants
from quire.server.access.turns import FairTurns
from quire.server.batches.calls import Asking
from quire.server.batches.lines import answered_line, failed_line, parse_line
from quire.server.batches.output import finish
from quire.server.batches.pace import OWN, Pace
from quire.server.batches.reader import read_lines
from quire.server.budget import Budget
from quire.server.config import ServerConfig
from quire.server.store.batches import ENDED, Batch, Line, LineError, Result, at
from quire.server.store.data import Data
from quire.server.store.patience import Done, patiently

log = logging.getLogger("quire.server")
BEHIND = 1 << 20
"""The priority of batches: whatever comes with a smaller number, 0 unless it says otherwise, goes first."""
MAX_OPEN = 64
"""Batches of a key that have not ended."""
MAX_UPLOADS = 16
"""Files that come at the same time. A key that has some gets more only while as many are left to others."""
_SHARE = 4
"""Lines are begun in at most one of so many places of the engine."""
_AT_A_TIME = 2
"""Lines that are begun between two looks: each takes the event loop some milliseconds, which others wait for."""
_LOOK_SECONDS = 0.005
_AHEAD = 64
"""Lines that are read from the database at once."""
_SWEEP_SECONDS = 600.0
_EXPIRED_AT_ONCE = 100
"""Files that are looked at before others are read."""


class BatchRunner:
    """All batches of a server. Of several API processes only the one that leads answers them; in the others this reads
    and changes what is stored of them. Call its methods on the event loop: they leave the disk to threads."""

    def __init__(
        self,
        app: ASGIApp,
        data: Data,
        tenants: Tenants,
        config: ServerConfig,
        clients: Callable[[], list[EngineClient]],
    ) -> None:
        """`app`: what answers the lines. `clients`: of all engines."""
        self._app = app
        self.batches, self.files, self.contents = data.batches, data.files, data.contents
        """What is stored; any thread may use these."""
        self.uploads = Budget(MAX_UPLOADS)
        """Uploads that this process receives, by owner."""
        self._tenants = tenants
        self._config = config
        self._pace = Pace(clients)
        self._places = FairTurns(max(1, config.most_running // _SHARE))
        self._reading = FairTurns(1)  # a file at a time, for threads compete with the event loop
        self._left: dict[str, asyncio.Event] = {}
        """By the batch's id: set when its lines shall end."""
        self.results = {"completed": 0, "failed": 0}
        """Lines that got their result in this process."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.leads = False
        """Whether this process answers all batches."""
        self._closing = False

    @property
    def num_open(self) -> int:
        return len(self._left)

    async def look(self) -> None:
        """Begin to answer the batches that have not ended; from the first call on, this process answers all of them.
        End those that other processes were asked to cancel."""
        if not self.leads:
            self.leads = True
            self._keep(asyncio.create_task(self._sweep()))
        for owner, batch in await asyncio.to_thread(self.batches.open):
            if (left := self._left.get(batch.id)) is None:
                self._begin(owner, batch)
            elif batch.status == "cancelling":
                left.set()

    async def close(self) -> None:
        """Stop where they are: the next start goes on."""
        self._closing = True
        for left in self._left.values():
            left.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def uses(self, file_id: str, owner: str) -> bool:
        """Whether a batch that has not ended reads a file. In a thread, please."""
        return self.batches.reads(owner, file_id)

    async def add(self, owner: str, batch: Batch) -> None:
        """Raises RateLimited where the owner has many already."""
        if not await asyncio.to_thread(self.batches.add, owner, batch, MAX_OPEN):
            raise RateLimited(f"{MAX_OPEN} batches have not ended yet. Please try again later", headers={})
        if self.leads:
            self._begin(owner, batch)

    async def cancel(self, owner: str, id: str) -> Batch:
        """Ends a batch; its results so far are kept. Raises RequestNotFound, and InvalidRequest for one that has ended
        or is about to."""
        batch = await asyncio.to_thread(self.batches.cancel, owner, id)
        if batch is None:
            raise RequestNotFound(f"No batch `{id}` is known here", param="batch_id")
        if (left := self._left.get(id)) is not None:
            left.set()
        return batch

    def _begin(self, owner: str, batch: Batch) -> None:
        if batch.id in self._left or self._closing:
            return
        self._left[batch.id] = asyncio.Event()
        self._keep(asyncio.create_task(self._run(owner, batch)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, owner: str, batch: Batch) -> None:
        """A batch to its end."""
        try:
            if batch.status == "validating":
                await self._read(owner, batch)
            if (now := await self._now(owner, batch.id)).status == "in_progress":
                await self._answer(owner, now)
            if not self._closing and (now := await self._now(owner, batch.id)).status not in ENDED:
                await self._patiently(lambda: finish(self.batches, self.contents, owner, now))
        except Exception:
            log.exception("the batch %s stopped; the next start goes on with it", batch.id)
        finally:
            del self._left[batch.id]

    async def _now(self, owner: str, id: str) -> Batch:
        found = await asyncio.to_thread(self.batches.find, owner, id)
        assert found is not None, "those that have not ended are kept"
        return found

    async def _read(self, owner: str, batch: Batch) -> None:
        """Make its lines known, or let it fail."""
        most = int(self._config.max_body_size * 2**20)
        try:
            path = self.contents.path(batch.input_file_id)
            async with self._reading.turn(owner):
                lines, errors = await asyncio.to_thread(read_lines, path, batch.endpoint, most)
        except OSError as error:
            lines, errors = [], [LineError("file_lost", f"The input file cannot be read: {error.strerror}")]
        now = changed(at(batch, "failed" if errors else "in_progress"), errors=tuple(errors), total=len(lines))
        await self._patiently(lambda: self.batches.set_lines(owner, now, lines))

    async def _answer(self, owner: str, batch: Batch) -> None:
        """Until all lines have a result, or the time is over, or nobody wants more."""
        left, ends = self._left[batch.id], max(0.0, batch.expires_at - clock.time())
        expire = asyncio.get_running_loop().call_later(ends, left.set)
        try:
            if (tenant := self._tenants.owner(owner)) is None:
                log.error("the batch %s waits for its API key, which is not taken here", batch.id)
                await left.wait()
            else:
                more = {"tenant": self._behind(tenant), PRIORITY: BEHIND}
                await self._answer_lines(Asking(self._app, more, left), owner, batch, left)
        finally:
            expire.cancel()
        if not self._closing:
            await self._patiently(partial(self.batches.finalize, owner, batch.id))

    def _behind(self, tenant: Tenant) -> Tenant:
        """The tenant with a share and limits of its own for batches: what it asks for itself is not held up."""
        return replace(tenant, name=f"{tenant.name}{OWN}", limits=tenant.limits.like_new())

    async def _answer_lines(self, asking: Asking, owner: str, batch: Batch, left: asyncio.Event) -> None:
        place, begun = -1, set[asyncio.Task[None]]()
        try:
            while lines := await self._patiently(partial(self.batches.left, batch.id, place, _AHEAD)):
                for number, line in enumerate(lines):
                    await self._places.acquire(owner)
                    if number % _AT_A_TIME == 0:
                        await asyncio.sleep(_LOOK_SECONDS)
                    while self._pace.holds(len(begun)) and not left.is_set():  # noqa: ASYNC110 - others change it
                        await asyncio.sleep(_LOOK_SECONDS)
                    if left.is_set():
                        self._places.release(owner)
                        return
                    self._pace.begin()
                    begun.add(task := asyncio.create_task(self._answer_line(asking, batch, line)))
                    task.add_done_callback(begun.discard)
                    task.add_done_callback(lambda _: self._places.release(owner))
                    place = line.place
        finally:
            await asyncio.gather(*begun)

    async def _answer_line(self, asking: Asking, batch: Batch, line: Line) -> None:
        """Put its result, unless nobody wants it any more."""
        try:
            content = await asyncio.to_thread(_content, self.contents.path(batch.input_file_id), line)
            job = parse_line(content)
        except (OSError, InvalidRequest) as error:
            result = failed_line(line.custom_id, "file_lost", f"The input file cannot be read any more: {error}")
            await self._put(batch, Result(line.place, failed=True, line=result))
            return
        if (answer := await asking.answer(job.url, job.body)) is not None:
            id, status = answer.headers.get("x-request-id", ""), answer.status
            result = answered_line(line.custom_id, status, id, answer.body)
            await self._put(batch, Result(line.place, status != HTTPStatus.OK, result))

    async def _put(self, batch: Batch, result: Result) -> None:
        await self._patiently(partial(self.batches.put_result, batch.id, result))
        self.results["failed" if result.failed else "completed"] += 1

    async def _patiently(self, do: Callable[[], Done]) -> Done:
        """What a thread does, again and again while the disk is full or refuses it: nothing is lost meanwhile."""
        return await patiently("batches wait", partial(asyncio.to_thread, do))

    async def _sweep(self) -> None:
        """Delete files whose time is over."""
        after: tuple[int, str, str] | None = None
        while True:
            expired = await self._patiently(partial(self.files.expired, after, _EXPIRED_AT_ONCE))
            for after in expired:
                _, owner, id = after
                if not await self._patiently(partial(self.uses, id, owner)):
                    await self._patiently(partial(self.files.delete, owner, id))
            if not expired:
                after = None
                await asyncio.sleep(_SWEEP_SECONDS)


def _content(path: Path, line: Line) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), line.length, line.start)
