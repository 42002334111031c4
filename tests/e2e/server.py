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

import httpx

_PATIENCE = 120.0
"""Seconds; a start takes a few, but the machine may be busy with other tests."""


def free_port() -> int:
    """One where nothing listens, and none of those that systems give away (on Linux from 32768): one of these
    may be another's, a listener's or a connection's, before the server listens."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """`quire serve ARGS` on the port, else a free one, of the loopback interface; waits until it answers, unless told
    not to."""

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
        # One for all looks, for a client takes long to make; no connection of it stays open while the server drains.
        self._http = httpx.Client(base_url=self.url, limits=httpx.Limits(max_keepalive_connections=0))
        script = quire or Path(sys.executable).with_name("quire")
        program = [str(script)] if script.exists() else [sys.executable, "-m", "quire"]  # where nothing is installed
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
            except BaseException:  # a test's timeout, too
                self.process.kill()
                raise

    def wait(self) -> None:
        """Until it is ready."""
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
        """The value of a metric without labels other than the model's."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))

    def engine_pids(self) -> list[int]:
        """Of the engines of the moment."""
        return self._children(b"quire.engine.main")

    def api_pids(self) -> list[int]:
        """Of the API processes of the moment, where there are several."""
        return self._children(b"quire.server.cli.api_process")

    def _children(self, module: bytes) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        # A dead child that nobody has waited for has no command line any more.
        return [int(pid) for pid in children if module in _command(pid)]

    def engine_pid(self) -> int | None:
        """Of the engine of the moment; None between two."""
        engines = self.engine_pids()
        return engines[0] if engines else None

    def stop(self, number: int = signal.SIGINT) -> int:
        """Ask it to end; the exit code."""
        self.process.send_signal(number)
        try:
            return self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the server did not end in {_PATIENCE:.0f} s: {self.log.read_text()}") from None


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has been waited for meanwhile
        return b""
