"""All that a server keeps in --data-dir."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.engine.common.errors import ConfigError
from quire.server.store.batches import Batches
from quire.server.store.database import Database, SQLiteConnect
from quire.server.store.files import FileContents, Files
from quire.server.store.garbage import Garbage
from quire.server.store.journal import Calls
from quire.server.store.owner_executor import OwnerExecutor
from quire.server.store.response_store import Store
from quire.server.store.sweeper import ResponseRetention, Sweeper


@dataclass(frozen=True, slots=True)
class DataDirStatus:
    """What one of several processes sees of all together."""

    leads: bool
    """Whether it is the one that answers batches, and takes up what others left."""
    sizes: Mapping[str, int]
    """Bytes of what is kept, by its kind."""
    counts: Mapping[str, int]
    """What all have counted, those that have ended too."""
    refusal: str
    """Why nothing can be written now; "" where it can."""


class ProcessStatus(msgspec.Struct, frozen=True):
    """What a process says of itself that shares the data, where the one that had them has been replaced."""

    calls: Sequence[tuple[str, str]] = ()
    """Owners and ids of those that it answers."""
    leads: bool = False


OPEN_BATCHES_KEY = "open"
"""What is counted of those alone that have not ended: open batches."""


class Processes:
    """Those that share the data, as long as this one lives. Threads may use it at the same time."""

    def __init__(self, database: Database, store: Store, files: Files, calls: Calls, sweeper: Sweeper) -> None:
        self._database = database
        self._store = store
        self._files = files
        self._calls = calls
        self._sweeper = sweeper
        self._mutex = threading.Lock()
        self._live_processes: dict[str, None] = {}
        """Those that have not ended; the first one leads."""
        self._counts_by_process: dict[str, Mapping[str, int]] = {}
        """By process."""
        self._ended_counts: Counter[str] = Counter()
        """Of those that have ended."""

    def exchange_status(self, process: str, counts: Mapping[str, int]) -> DataDirStatus:
        """`counts`: what the process has counted. The first that looks leads, until it has ended."""
        with self._mutex:
            self._live_processes.setdefault(process)
            self._counts_by_process[process] = counts
            summed = self._ended_counts.copy()
            for each in self._counts_by_process.values():
                summed.update(each)
            leads = next(iter(self._live_processes)) == process
        sizes = {
            "responses": self._store.stored_bytes,
            "files": self._files.stored_bytes,
            "journal": self._calls.stored_bytes,
        }
        return DataDirStatus(leads, sizes, summed, self._database.probe_write_error())

    def rejoin_process(self, process: str, status: ProcessStatus) -> None:
        """One that had another process's data before."""
        self._calls.register_answering_process(process, status.calls)
        with self._mutex:
            self._live_processes = (
                {process: None, **self._live_processes} if status.leads else {**self._live_processes, process: None}
            )

    def remove_process(self, process: str) -> None:
        """A process has ended."""
        self._calls.handle_process_end(process)
        self._files.release_process_uploads(process)
        with self._mutex:
            self._live_processes.pop(process, None)
            self._ended_counts.update(self._counts_by_process.pop(process, {}))
            self._ended_counts[OPEN_BATCHES_KEY] = 0

    def delete_due_data(self) -> bool:
        """Delete what is due, for a moment. Returns whether there is more of it. One process does so at a time."""
        return self._sweeper.sweep()

    def list_abandoned_responses(self) -> list[tuple[str, str]]:
        """Owners and ids of the responses in the background that no process works on."""
        return [each for each in self._store.unfinished_responses() if self._calls.answering_process(*each) is None]


@dataclass(frozen=True, slots=True)
class DataDir:
    store: Store
    files: Files
    contents: FileContents
    batches: Batches
    calls: Calls
    processes: Processes
    owner_executor: OwnerExecutor
    """Of this process, for puts and deletes of objects."""
    close: Callable[[], None]


def open_data_dir(
    folder: Path,
    max_bytes: int,
    live_processes: Container[str] = (),
    *,
    retention_seconds: float = 0,
    connect: SQLiteConnect | None = None,
) -> DataDir:
    """`max_bytes`: of what the Responses API keeps, and as much again of files and of calls. `live_processes`:
    processes that share it already, because the one that had it has been replaced. `retention_seconds`: seconds after
    which stored responses are deleted; 0: never. `connect`: see Database. Raises ConfigError."""
    database = Database(folder, connect)
    try:
        garbage, files = Garbage(database), Files(database, max_bytes)
        store, calls = Store(database, garbage, max_bytes), Calls(database, max_bytes, live_processes)
        sweeper = Sweeper(database, garbage, store, calls, ResponseRetention(database, store, retention_seconds))
    except OSError as error:
        database.close()
        raise ConfigError(f"data_dir: cannot keep files in {folder}: {error.strerror}", param="data_dir") from None
    except sqlite3.DatabaseError as error:  # a part of it is damaged
        database.close()
        raise ConfigError(f"data_dir: cannot read what is kept in {folder}: {error}", param="data_dir") from None
    batches = Batches(database, files, garbage)
    processes = Processes(database, store, files, calls, sweeper)
    return DataDir(store, files, files.contents, batches, calls, processes, OwnerExecutor(), database.close)
