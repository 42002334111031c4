"""The process with --data-dir, and what the replicas ask it and, through it, each other.

It may be replaced while replicas run. Joining replicas tell the new one what the old one knew; until all known ones
have joined, it answers none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec

from quire.engine.client.messages import LEADER
from quire.engine.common import random_source
from quire.server.durability.data_dir import ProcessStatus, open_data_dir
from quire.server.durability.data_dir_rpc import serve_data_dir_call_in_thread
from quire.server.durability.write_ahead_log import LOG_FILE_PREFIX
from quire.server.store.database import SQLiteConnect

log = logging.getLogger("quire.server")
LIFE = "journal-life"
"""File with the owner's id: replicas compare it to see that they have the same folder."""
_LOOK_SECONDS = 0.5
"""Between checks which replicas exist."""
_JOIN_SECONDS = 30.0
"""How long others wait for a replica that has not joined."""
_POLL_SECONDS = 5.0
_ANSWER_SECONDS = 10.0
"""How long a replica may take to answer another's question."""


@dataclass(frozen=True, slots=True)
class Question:
    """From one replica to another."""

    number: int
    topic: str
    body: bytes


@dataclass(eq=False, slots=True)
class _Member:
    waiting: list[Question] = field(default_factory=list)
    """Questions that it has not received."""
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while there are any."""
    answers: dict[int, asyncio.Future[bytes | None]] = field(default_factory=dict)


class Members:
    """Call from the event loop; only `living` runs in a thread."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        living: Callable[[], Set[str]],
        retention: float = 0,
        connect: SQLiteConnect | None = None,
    ) -> None:
        """`max_bytes`, `retention`, `connect`: see open_data_dir, whose errors it raises. `living`: names of running
        replicas; slow.
        """
        self._living = living
        self._data = open_data_dir(folder, max_bytes, there := living(), retention_seconds=retention, connect=connect)
        self.life = random_source.token_hex(8)
        """Unique per process."""
        (folder / LIFE).write_text(self.life)
        tails = {path.name.removeprefix(LOG_FILE_PREFIX) for path in folder.glob(f"{LOG_FILE_PREFIX}*")}
        self._awaited = tails & there
        """Replicas of the previous process that have not joined."""
        self._members: dict[str, _Member] = {}
        self._numbers = count()
        self._all_there = asyncio.Event()
        self._task = asyncio.create_task(self._watch())

    async def close(self) -> None:
        self.life = ""
        for member in self._members.values():
            member.asked.set()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._data.close)

    async def join(self, process: str, standing: bytes | None) -> str:
        """Admit a replica. `standing`: its ProcessStatus as msgpack; None if it has not begun. Returns `life`."""
        if process not in self._members:
            self._members[process] = _Member()
            told = ProcessStatus() if standing is None else msgspec.msgpack.decode(standing, type=ProcessStatus)
            self._data.processes.rejoin_process(process, told)
            self._awaited.discard(process)
        return self.life

    async def ask(self, life: str, process: str, topic: str, body: bytes, to: str) -> list[bytes] | None:
        """The answer of LEADER or another replica; empty if it has none or has ended. None: join first."""
        if life != self.life or process not in self._members:
            return None
        await self._all_there.wait()
        if to == LEADER:
            return [await serve_data_dir_call_in_thread(self._data, body)]
        said = await self._said(to, topic, body)
        return [] if said is None else [said]

    async def questions(self, life: str, process: str) -> list[Question] | None:
        """Questions for a replica; empty after _POLL_SECONDS. None: it must join first."""
        member = self._members.get(process)
        if life != self.life or member is None:
            return None
        with suppress(TimeoutError):
            await asyncio.wait_for(member.asked.wait(), _POLL_SECONDS)
        if life != self.life:
            return None
        found, member.waiting = member.waiting, []
        member.asked.clear()
        return found

    async def say(self, process: str, number: int, body: bytes | None) -> None:
        member = self._members.get(process)
        if member is not None and (waiting := member.answers.get(number)) is not None and not waiting.done():
            waiting.set_result(body)

    async def _said(self, to: str, topic: str, body: bytes) -> bytes | None:
        if (member := self._members.get(to)) is None:
            return None
        number = next(self._numbers)
        said = member.answers[number] = asyncio.get_running_loop().create_future()
        member.waiting.append(Question(number, topic, body))
        member.asked.set()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await said
        except TimeoutError:
            return None
        finally:
            del member.answers[number]

    async def _watch(self) -> None:
        """Take up the work of ended replicas."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + _JOIN_SECONDS
        while True:
            try:
                living = await asyncio.to_thread(self._living)
            except Exception as error:  # Ray cannot answer now
                log.error("which replicas there are is not known now: %s", error)
            else:
                for process in (self._members.keys() | self._awaited) - living:
                    await self._end(process)
            if not self._awaited or loop.time() > ends:
                self._all_there.set()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _end(self, process: str) -> None:
        """Recover its log before ending awaited answers: who waits for them then finds all of it."""
        await asyncio.to_thread(self._data.processes.remove_process, process)
        self._awaited.discard(process)
        if (member := self._members.pop(process, None)) is not None:
            for each in member.answers.values():
                if not each.done():
                    each.set_result(None)
