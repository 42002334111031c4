from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.engine.common.errors import ConfigError
from quire.server.durability.journal import Calls
from quire.server.store.batches import Batches
from quire.server.store.data_dir_status import OPEN_BATCHES_KEY, DataDirStatus
from quire.server.store.database import Database, SQLiteConnect
from quire.server.store.files import FileContents, Files
from quire.server.store.garbage import Garbage
from quire.server.store.owner_executor import OwnerExecutor
from quire.server.store.response_store import Store
from quire.server.store.sweeper import EXPIRY_PAUSE_SECONDS, ResponseRetention, Sweeper, SweepJob


class ProcessStatus(msgspec.Struct, frozen=True):
    """After the process that owns the data was replaced, each process sends this to the new owner."""

    calls: Sequence[tuple[str, str]] = ()
    leads: bool = False


class Processes:
    """Thread-safe. Not stored on disk."""

    def __init__(self, database: Database, store: Store, files: Files, calls: Calls, sweeper: Sweeper) -> None:
        self._database = database
        self._store = store
        self._files = files
        self._calls = calls
        self._sweeper = sweeper
        self._mutex = threading.Lock()
        self._live_processes: dict[str, None] = {}
        self._counts_by_process: dict[str, Mapping[str, int]] = {}
        self._ended_counts: Counter[str] = Counter()

    def exchange_status(self, process: str, counts: Mapping[str, int]) -> DataDirStatus:
        """The first process that calls this is the leader until it ends."""
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
        """If the process was the leader, it remains the leader."""
        self._calls.register_answering_process(process, status.calls)
        with self._mutex:
            self._live_processes = (
                {process: None, **self._live_processes} if status.leads else {**self._live_processes, process: None}
            )

    def remove_process(self, process: str) -> None:
        self._calls.handle_process_end(process)
        self._files.release_process_uploads(process)
        with self._mutex:
            self._live_processes.pop(process, None)
            self._ended_counts.update(self._counts_by_process.pop(process, {}))
            self._ended_counts[OPEN_BATCHES_KEY] = 0

    def delete_due_data(self) -> bool:
        """Returns True if more data is due. While another call sweeps, does nothing and returns False."""
        return self._sweeper.sweep()

    def list_abandoned_responses(self) -> list[tuple[str, str]]:
        """Returns (owner, id) of each."""
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
    """In the process that owns the data, its threads also run puts, appends and deletes of other processes."""
    close: Callable[[], None]


def open_data_dir(
    folder: Path,
    max_bytes: int,
    live_processes: Container[str] = (),
    *,
    retention_seconds: float = 0,
    connect: SQLiteConnect | None = None,
) -> DataDir:
    """`max_bytes` bounds objects, files and calls separately. `live_processes` still run, and shared the data with an
    earlier owner. `retention_seconds` is the maximum age of responses; 0 means unlimited. Raises ConfigError.
    """
    database = Database(folder, connect)
    try:
        garbage, files = Garbage(database), Files(database, max_bytes)
        store, calls = Store(database, garbage, max_bytes), Calls(database, max_bytes, live_processes)
        retention = ResponseRetention(database, store, retention_seconds)
    except OSError as error:
        database.close()
        raise ConfigError(f"data_dir: cannot keep files in {folder}: {error.strerror}", param="data_dir") from None
    except sqlite3.DatabaseError as error:
        database.close()
        raise ConfigError(f"data_dir: cannot read the data stored in {folder}: {error}", param="data_dir") from None
    sweeper = Sweeper(
        database,
        (
            SweepJob(store.quota.evict_toward_low_water),
            SweepJob(calls.quota.evict_toward_low_water),
            SweepJob(garbage.purge_rows),
            SweepJob(retention.delete_due_responses, EXPIRY_PAUSE_SECONDS),
            SweepJob(calls.delete_expired_calls, EXPIRY_PAUSE_SECONDS),
        ),
    )
    batches = Batches(database, files, garbage)
    processes = Processes(database, store, files, calls, sweeper)
    return DataDir(store, files, files.contents, batches, calls, processes, OwnerExecutor(), database.close)
