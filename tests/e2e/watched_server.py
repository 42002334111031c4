"""`quire` with a log of how long the event loop of its HTTP server is blocked, in seconds of processor time."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from socket import socket

from quire.server.cli import main
from quire.server.http.server import HttpServer

NOTED = 0.01
"""Seconds of processor time without a turn of the event loop from which a block is logged."""


async def watch(log: Path) -> None:
    with log.open("a", buffering=1) as lines:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0.002)
            after = time.thread_time()
            if after - before > NOTED:
                lines.write(f"{time.monotonic()} {after - before}\n")
            before = after


def run() -> None:
    plain = HttpServer.startup

    async def startup(self: HttpServer, sockets: list[socket] | None = None) -> None:
        await plain(self, sockets)
        self.watching = asyncio.create_task(watch(Path(os.environ["BLOCKS"])))  # type: ignore[attr-defined]

    HttpServer.startup = startup  # type: ignore[method-assign]
    main.main()
