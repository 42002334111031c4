"""All that a server keeps in --data-dir."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.engine.errors import ConfigError
from quire.server.store.batches import Batches
from quire.server.store.calls import Calls
from quire.server.store.database import Connect, Database
from quire.server.store.files import Contents, Files
from quire.server.store.garbage import Garbage
from quire.server.store.owner_threads import OwnerThreads
from quire.server.store.store import Store
from quire.server.store.sweeper import Retention, Sweeper


@dataclass(frozen=True, slots=True)
class Look:
    """What one of several processes sees of all together."""

    leads: bool
    """Whether it is the one that answers batches, and takes up what others left."""
    sizes: Mapping[str, int]
    """Bytes of what is kept, by its kind."""
    counts: Mapping[str, int]
    """What all have counted, those that have ended too."""
    refusal: str
    """Why nothing can be written now; "" where it can."""


class Standing(msgspec.Struct, frozen=True):
    """What a process says of itself that shares the data, where the one that had them has been replaced."""

    calls: Sequence[tuple[str, str]] = ()
    """Owners and ids of those that it answers."""
    leads: bool = False


OPEN = "open"
"""What is counted of those alone that have not ended: open batches."""


class Processes:
    """Those that share the data, as long as this one lives. Threads may use it at the same time."""

    def __init__(self, database: Database, store: Store, files: Files, calls: Calls, sweeper: Sweeper) -> None:
        self._database, self._store, self._files, self._calls = database, store, files, calls
        self._sweeper = sweeper
        self._mutex = threading.Lock()
        self._there: dict[str, None] = {}
        """Those that have not ended; the first one leads."""
        self._counts: dict[str, Mapping[str, int]] = {}
        """By process."""
        self._before: Counter[str] = Counter()
        """Of those that have ended."""

    def look(self, process: str, counts: Mapping[str, int]) -> Look:
        """`counts`: what the process has counted. The first that looks leads, until it has ended."""
        with self._mutex:
            self._there.setdefault(process)
            self._counts[process] = counts
            summed = self._before.copy()
            for each in self._counts.values():
                summed.update(each)
            leads = next(iter(self._there)) == process
        sizes = {"responses": self._store.size, "files": self._files.size, "journal": self._calls.size}
        return Look(leads, sizes, summed, self._database.look())

    def join(self, process: str, standing: Standing) -> None:
        """One that had another process's data before."""
        self._calls.hold(process, standing.calls)
        with self._mutex:
            self._there = {process: None, **self._there} if standing.leads else {**self._there, process: None}

    def gone(self, process: str) -> None:
        """A process has ended."""
        self._calls.gone(process)
        self._files.release_of(process)
        with self._mutex:
            self._there.pop(process, None)
            self._before.update(self._counts.pop(process, {}))
            self._before[OPEN] = 0

    def sweep(self) -> bool:
        """Delete what is due, for a moment. Returns whether there is more of it. One process does so at a time."""
        return self._sweeper.sweep()

    def left(self) -> list[tuple[str, str]]:
        """Owners and ids of the responses in the background that no process works on."""
        return [each for each in self._store.unfinished() if self._calls.holder(*each) is None]


@dataclass(frozen=True, slots=True)
class Data:
    store: Store
    files: Files
    contents: Contents
    batches: Batches
    calls: Calls
    processes: Processes
    threads: OwnerThreads
    """Of this process, for puts and deletes of objects."""
    close: Callable[[], None]


def open_data(
    folder: Path,
    max_bytes: int,
    living: Container[str] = (),
    *,
    retention: float = 0,
    connect: Connect | None = None,
) -> Data:
    """`max_bytes`: of what the Responses API keeps, and as much again of files and of calls. `living`: processes that
    share it already, because the one that had it has been replaced. `retention`: seconds after which stored responses
    are deleted; 0: never. `connect`: see Database. Raises ConfigError."""
    database = Database(folder, connect)
    try:
        garbage, files = Garbage(database), Files(database, max_bytes)
        store, calls = Store(database, garbage, max_bytes), Calls(database, max_bytes, living)
        sweeper = Sweeper(database, garbage, store, calls, Retention(database, store, retention))
    except OSError as error:
        database.close()
        raise ConfigError(f"data_dir: cannot keep files in {folder}: {error.strerror}", param="data_dir") from None
    except sqlite3.DatabaseError as error:  # a part of it is damaged
        database.close()
        raise ConfigError(f"data_dir: cannot read what is kept in {folder}: {error}", param="data_dir") from None
    batches = Batches(database, files, garbage)
    together = Processes(database, store, files, calls, sweeper)
    return Data(store, files, files.contents, batches, calls, together, OwnerThreads(), database.close)
