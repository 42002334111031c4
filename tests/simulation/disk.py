"""A disk that fills up, and that keeps what was written when a process or the machine ends in the middle of a write."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.server.durability.write_ahead_log import LOG_FILE_PREFIX
from quire.server.store.database import DATABASE_FILE
from tests.simulation.clock import PROCESS, Owned

FULL = "database or disk is full"


class Disk:
    """One process's folder."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder = folder
        self._rng = rng
        self.full = False
        self.statements = 0
        self.at_statement: Callable[[int], None] = lambda statement: None

    def before(self, connection: Connection, statement: str) -> None:
        """May raise what SQLite raises where the disk is full, of which it has taken the transaction back, or not."""
        self.statements += 1
        self.at_statement(self.statements)
        process = PROCESS.get()
        if process is not None and process.dead:
            raise sqlite3.OperationalError("the process has ended")
        word = statement.split(None, 1)[0]
        if self.full and word in ("begin", "insert", "update", "delete", "commit") and self._rng.random() < 0.7:
            if word == "commit" and self._rng.random() < 0.5:
                connection.give_back()
            raise sqlite3.OperationalError(FULL)

    def left(self, folder: Path, *, power: bool) -> None:
        """Copy what the next process finds. `power`: the machine's, with which the end of the log is lost; it may be
        torn, too."""
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("*-shm", "lock"))
        if power:  # the next boot does not trust it
            for tail in folder.glob(f"{LOG_FILE_PREFIX}*"):
                tail.unlink()
        log = folder / f"{DATABASE_FILE}-wal"
        if not power or not log.exists():
            return
        size = log.stat().st_size
        kept = max(0, size - self._rng.randrange(0, 1 + min(size, 40_000)))
        content = log.read_bytes()[:kept] + self._rng.randbytes(self._rng.choice((0, 0, 100, 5000)))
        log.write_bytes(content)


class Connection(sqlite3.Connection):
    """SQLite's connection on the disk of the process that opens it."""

    disk: Disk | None = None

    def execute(self, statement: str, *given: Any) -> sqlite3.Cursor:
        if self.disk is not None:
            self.disk.before(self, statement)
        return super().execute(statement, *given)

    def executemany(self, statement: str, *given: Any) -> sqlite3.Cursor:
        if self.disk is not None:
            self.disk.before(self, statement)
        return super().executemany(statement, *given)

    def give_back(self) -> None:
        super().execute("rollback")


class WithDisk(Owned):
    disk: Disk


def connect(*args: Any, **more: Any) -> sqlite3.Connection:
    """sqlite3.connect, for a process of a simulation. Opening a file is no write that may fail here."""
    connection = sqlite3.connect(*args, **more, factory=Connection)
    if isinstance(process := PROCESS.get(), WithDisk):
        connection.disk = process.disk
    return connection
