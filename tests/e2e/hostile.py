"""A server with a watched event loop, attacks on it while an honest client is served, and the checks that hold for each
attack.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from benchmarks.attacks import ATTACKS, Attack, encoded, send
from tests.e2e.server import Server
from tests.tree import ROOT

MAX_GROWTH = 400 * 2**20
"""Bytes by which the memory of the server process may grow."""
MAX_BLOCK = 0.3
"""Seconds of processor time that the event loop may spend without a turn. On a quiet machine it is 0.05 or less;
unbounded work takes far longer than this limit.
"""
TENANTS = [f"key-{i}" for i in range(10)]
"""API keys. The last one belongs to the honest client."""
FLAGS = ("--trust-request-chat-template", "--num-kv-blocks", "4096", "--max-num-seqs", "64", "--pooling-type", "last")


class Watched(Server):
    """`quire serve` of the embedded model with the API keys of TENANTS. It logs how long its event loop was blocked."""

    def __init__(self, folder: Path, *flags: str) -> None:
        program, self._blocks = folder / "quire", folder / "blocks"
        program.write_text(f"#!{sys.executable}\nfrom tests.e2e.watched_server import run\nrun()\n")
        program.chmod(0o755)
        self._blocks.touch()
        keys = [part for key in TENANTS for part in ("--api-key", key)]
        env = {"BLOCKS": str(self._blocks), "PYTHONPATH": str(ROOT)}
        super().__init__(folder / "log", *FLAGS, *keys, *flags, quire=program, env=env)
        # The first grammar, template and large prompt start processes that stay; the tests do not measure these.
        asyncio.run(send(self.port, ATTACKS[0], encoded(ATTACKS[0]), TENANTS[0]))
        self.idle = self.peak()
        """Peak memory in bytes before any attack was sent."""

    def peak(self) -> int:
        """Peak memory of the process in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def longest_block(self, since: float) -> float:
        """Seconds of processor time of the longest block of the event loop after `since`, a time of the monotonic
        clock.
        """
        lines = (line.split() for line in self._blocks.read_text().splitlines())
        return max((float(seconds) for at, seconds in lines if float(at) > since), default=0.0)

    def client(self, key: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)


@contextmanager
def watched_server(folder: Path, *flags: str) -> Iterator[Watched]:
    server = Watched(folder, *flags)
    yield server
    assert server.stop() == 0


async def honest(server: Server, done: asyncio.Event) -> int:
    """Send short requests of the honest client; return how many were answered."""
    answered = 0
    headers = {"Authorization": f"Bearer {TENANTS[-1]}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as http:
        while not done.is_set():
            (await http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 1})).raise_for_status()
            answered += 1
            await asyncio.sleep(0.05)
    return answered


async def attacked(server: Server, attack: Attack, keys: Sequence[str]) -> set[int]:
    """Return the status codes of an attack that is sent with all keys at once while an honest client is served."""
    body = encoded(attack)
    done = asyncio.Event()
    others = asyncio.create_task(honest(server, done))
    answers = await asyncio.gather(*(send(server.port, attack, body, key) for key in keys))
    done.set()
    assert await others > 0
    return {status for each in answers for status in each}


def unnoticed(server: Watched, statuses: Callable[[], set[int]], allowed: set[int]) -> None:
    """Assert that an attack costs its sender only. `statuses` runs the attack and returns the status codes of its
    answers.
    """
    longest = []
    for _ in range(3):  # load of other programs can double a block once; blocks of our own repeat
        began = time.monotonic()
        assert statuses() <= allowed
        assert server.peak() - server.idle < MAX_GROWTH
        longest.append(server.longest_block(began))
        if longest[-1] < MAX_BLOCK:
            return
    pytest.fail(f"the event loop was held for {longest} s")
