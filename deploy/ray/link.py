"""A replica's way to the process that has --data-dir (members.py), which may be replaced meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from deploy.ray.members import LIFE, Question
from quire.engine.client.messages import LEADER
from quire.engine.common.errors import ConfigError, Overloaded
from quire.engine.processes.answering import Answering
from quire.engine.processes.tasks import Tasks
from quire.server.durability.persistence import STATUS_TOPIC

log = logging.getLogger("quire.server")
Call = Callable[..., Awaitable[Any]]
_AGAIN_SECONDS = 0.5


class JournalLink:
    """A Link of server/peers.py. All methods are the event loop's."""

    def __init__(self, identity: str, call: Call) -> None:
        """`identity`: the replica's name. `call` calls a method of Members by its name, with what it is given; raises
        Overloaded where the process ends before it answers, and waits where there is none."""
        self._identity = identity
        self._call = call
        self.answering = Answering()
        self._life = ""
        """Of the one that this replica has joined."""
        self._joining = asyncio.Lock()
        self._tasks = Tasks(lambda error: log.error("others can ask this replica nothing", exc_info=error))

    @property
    def identity(self) -> str:
        return self._identity

    async def begin(self, folder: Path) -> None:
        """Join, and answer others from now on. Raises ConfigError where this machine has not the same `folder`."""
        await self._join("")
        life = await asyncio.to_thread(_read, folder / LIFE)
        if life != self._life:
            told = f"{folder} is not the folder that the journal has: all machines of replicas need the same one"
            raise ConfigError(f"data_dir: {told}", param="data_dir")
        self._tasks.begin(self._answer_others())

    async def close(self) -> None:
        await self._tasks.cancel()

    async def ask(self, topic: str, body: bytes = b"", *, to: str | None = None) -> list[bytes]:
        """As SharedClient.ask, of one that is named. Raises Overloaded where it is not known whether that was done."""
        while True:
            life = self._life
            said: list[bytes] | None = await self._call("ask", life, self._identity, topic, body, to or LEADER)
            if said is not None:
                return said
            await self._join(life)

    async def _join(self, left: str) -> None:
        """Join the one that is there now, if nobody else has done so since `left` was the one."""
        async with self._joining:
            if self._life != left:
                return
            say = self.answering.find(STATUS_TOPIC)
            self._life = await self._call("join", self._identity, None if say is None else await say(b""))

    async def _answer_others(self) -> None:
        while True:
            life = self._life
            try:
                asked: list[Question] | None = await self._call("questions", life, self._identity)
                if asked is None:
                    await self._join(life)
            except Overloaded:
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            for each in asked or ():
                self._tasks.begin(self._answer(each))

    async def _answer(self, question: Question) -> None:
        body = await self.answering.answer(question.topic, question.body)
        try:
            await self._call("say", self._identity, question.number, body)
        except Overloaded:  # then nobody waits for it
            log.warning("the journal's process ended before it heard an answer")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
