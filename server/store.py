"""What the Responses API keeps: responses and conversations, in SQLite under --data-dir, each its owner's alone."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from quire.engine.errors import ConfigError

FILE = "responses.sqlite3"
PATIENCE = 10.0
"""Seconds that a read or a write waits for another."""
SCHEMA = """
create table if not exists kept (
    owner text not null, id text not null, at real not null, unfinished integer not null, size integer not null,
    data text not null, primary key (owner, id));
create index if not exists by_age on kept (owner, at);
"""
Data = dict[str, Any]


class Store:
    """JSON objects by their owner and id. Threads may use it at the same time.

    When they take more than `max_bytes` together, the oldest of the owner with most bytes are forgotten.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Raises ConfigError for a folder that cannot be used, or that another server uses."""
        self._max_bytes = max_bytes
        self._mutex = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._held = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(folder / FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self._database = sqlite3.connect(
                folder / FILE, timeout=PATIENCE, check_same_thread=False, isolation_level=None
            )
            self._database.execute("pragma journal_mode = wal")
            self._database.execute("pragma synchronous = normal")
            self._database.executescript(SCHEMA)
        except BlockingIOError:
            raise ConfigError("data_dir: another server uses this folder", param="data_dir") from None
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"data_dir: cannot keep responses in {folder}: {error}", param="data_dir") from None
        sizes = self._database.execute("select owner, sum(size) from kept group by owner")
        self._sizes: dict[str, int] = {owner: int(size) for owner, size in sizes}

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        return sum(self._sizes.values())

    def close(self) -> None:
        self._database.close()
        os.close(self._held)

    def get(self, owner: str, id: str) -> Data | None:
        with self._mutex:
            return _get(self._database, owner, id)

    def put(self, owner: str, id: str, data: Data, *, unfinished: bool = False) -> None:
        """`unfinished`: what is being worked on in this process, and will never end in another."""
        with self._mutex:
            self._put(owner, id, data, unfinished)

    def update(self, owner: str, id: str, change: Callable[[Data], Data]) -> Data | None:
        """Put what `change` makes of the object, with no other change between; None where there is none."""
        with self._mutex:
            data = _get(self._database, owner, id)
            if data is not None:
                data = change(data)
                self._put(owner, id, data, False)
            return data

    def delete(self, owner: str, id: str) -> bool:
        """Whether there was one."""
        with self._mutex:
            row = self._database.execute("select size from kept where owner = ? and id = ?", (owner, id)).fetchone()
            if row is not None:
                self._forget(owner, id, row[0])
            return row is not None

    def end_unfinished(self, change: Callable[[Data], Data]) -> None:
        """Put what `change` makes of those that another process worked on, which is gone."""
        rows = self._database.execute("select owner, id, data from kept where unfinished").fetchall()
        for owner, id, data in rows:
            self.put(owner, id, change(json.loads(data)))

    def _put(self, owner: str, id: str, data: Data, unfinished: bool) -> None:
        text = json.dumps(data)
        before = self._database.execute("select size from kept where owner = ? and id = ?", (owner, id)).fetchone()
        row = (owner, id, time.time(), unfinished, len(text), text)
        self._database.execute("insert or replace into kept values (?, ?, ?, ?, ?, ?)", row)
        self._sizes[owner] = self._sizes.get(owner, 0) + len(text) - (before[0] if before else 0)
        while self.size > self._max_bytes:
            largest = max(self._sizes, key=lambda name: self._sizes[name])
            oldest = "select id, size from kept where owner = ? order by at limit 1"
            self._forget(largest, *self._database.execute(oldest, (largest,)).fetchone())

    def _forget(self, owner: str, id: str, size: int) -> None:
        self._database.execute("delete from kept where owner = ? and id = ?", (owner, id))
        self._sizes[owner] -= size


@contextmanager
def reading(folder: Path) -> Iterator[Callable[[str, str], Data | None]]:
    """Gives a function that reads as Store.get does, in another process than the one that has the Store."""
    with closing(
        sqlite3.connect(f"{(folder / FILE).resolve().as_uri()}?mode=ro", uri=True, timeout=PATIENCE)
    ) as database:
        yield partial(_get, database)


def _get(database: sqlite3.Connection, owner: str, id: str) -> Data | None:
    row = database.execute("select data from kept where owner = ? and id = ?", (owner, id)).fetchone()
    if row is None:
        return None
    data = json.loads(row[0])
    assert isinstance(data, dict)
    return data
