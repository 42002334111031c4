"""Forks server/workers/worker.py from a process that has imported its modules, so that it starts at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from quire.server.workers.worker import run_fork_server

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])


class ForkedChild:
    """The part of Child that WorkerPool uses."""

    def __init__(self, arguments: Sequence[str], *, descriptors: Sequence[int], environment: Mapping[str, str]) -> None:
        self._input, child_socket = socket.socketpair()
        with socket.socket(fileno=os.dup(descriptors[0])) as control, child_socket:
            self._process = _CONTEXT.Process(target=_run, args=(child_socket, control, dict(environment)), daemon=True)
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send(self, content: bytes) -> None:
        self._input.sendall(content)

    async def stop(self, seconds: float) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.join)
        self._input.close()


FORKED: Any = ForkedChild
"""`launch_process` of a WorkerPool."""


def _run(configuration: socket.socket, control: socket.socket, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.update(environment, TOKENIZERS_PARALLELISM="false")
    run_fork_server(configuration.makefile("rb"), control)
