"""A replica's connection to the process with --data-dir (members.py), which may be replaced."""

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
    """A PeerLink of server/durability/peers.py. Call its methods from the event loop."""

    def __init__(self, identity: str, call: Call) -> None:
        """`identity`: the replica's name. `call` calls a method of Members by name; it raises Overloaded if the process
        ends before it answers, and waits if there is none.
        """
        self._identity = identity
        self._call = call
        self.answering = Answering()
        self._life = ""
        """Of the process that this replica joined."""
        self._joining = asyncio.Lock()
        self._tasks = Tasks(lambda error: log.error("others can ask this replica nothing", exc_info=error))

    @property
    def identity(self) -> str:
        return self._identity

    async def begin(self, folder: Path) -> None:
        """Join and start answering others. Raises ConfigError if this machine does not have the same `folder`."""
        await self._join("")
        life = await asyncio.to_thread(_read, folder / LIFE)
        if life != self._life:
            told = f"{folder} is not the folder that the journal has: all machines of replicas need the same one"
            raise ConfigError(f"data_dir: {told}", param="data_dir")
        self._tasks.begin(self._answer_others())

    async def close(self) -> None:
        await self._tasks.cancel()

    async def ask(self, topic: str, body: bytes = b"", *, to: str | None = None) -> list[bytes]:
        """As SharedClient.ask, of a named process. Raises Overloaded if it is unknown whether the call took effect."""
        while True:
            life = self._life
            said: list[bytes] | None = await self._call("ask", life, self._identity, topic, body, to or LEADER)
            if said is not None:
                return said
            await self._join(life)

    async def _join(self, left: str) -> None:
        """Join the current process, unless another task has done so since `left`."""
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
        except Overloaded:  # nobody waits for the answer any more
            log.warning("the journal's process ended before it heard an answer")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
