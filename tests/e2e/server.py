"""A real `quire serve` process for tests."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import httpx

_PATIENCE = 120.0
"""Seconds. A start takes a few, but the machine may be busy with other tests."""


def free_port() -> int:
    """Return a port where nothing listens, outside the ephemeral range (on Linux from 32768), which another listener or
    connection could take before the server listens.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """`quire serve ARGS` on the loopback interface at the given or a free port. Waits until the server answers, unless
    `wait` is False. At the end of its context it is killed, and an exception prints its log.
    """

    def __init__(
        self,
        log: Path,
        *args: str,
        quire: Path | None = None,
        wait: bool = True,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        # One client for all polls, because making one is slow; none of its connections stays open while the server
        # drains.
        self._http = httpx.Client(base_url=self.url, limits=httpx.Limits(max_keepalive_connections=0))
        script = quire or Path(sys.executable).with_name("quire")
        program = [str(script)] if script.exists() else [sys.executable, "-m", "quire"]  # without an installed command
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*program, "serve", *args, "--port", str(self.port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(env or {}),
            )
        if wait:
            try:
                self.wait()
            except BaseException:  # including a test's timeout
                self.process.kill()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            print(self.log.read_text())
        self.process.kill()
        self.process.wait()

    def wait(self) -> None:
        """Wait until the server is ready."""
        deadline = time.monotonic() + _PATIENCE
        while not self.healthy():
            assert self.process.poll() is None, f"the server ended: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"the server did not start in {_PATIENCE:.0f} s: {self.log.read_text()}"
            time.sleep(0.05)

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path)

    def healthy(self) -> bool:
        try:
            return self.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def metric(self, name: str) -> float:
        """Sum of a metric's values that have labels."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))

    def engine_pids(self) -> list[int]:
        """Process ids of the current engines."""
        return children(self.process.pid, b"quire.engine.main")

    def api_pids(self) -> list[int]:
        """Process ids of the current API processes; empty if there is only one process."""
        return children(self.process.pid, b"quire.server.cli.api_process")

    def engine_pid(self) -> int | None:
        """Process id of the current engine; None between two engines."""
        engines = self.engine_pids()
        return engines[0] if engines else None

    def stop(self, number: int = signal.SIGINT) -> int:
        """Send a signal to the server and return its exit code."""
        self.process.send_signal(number)
        try:
            return self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server did not end in {_PATIENCE:.0f} s: {self.log.read_text()}") from None


def children(pid: int, module: bytes = b"") -> list[int]:
    """Children that any thread of a process has started, and whose command line contains `module`; without zombies."""
    child_pids = list[int]()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            child_pids += map(int, file.read_text().split())
    return [child for child in child_pids if module in (command := _command(child)) and command]


def _command(pid: int) -> bytes:
    """Empty for a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it was reaped meanwhile
        return b""
