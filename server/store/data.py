"""All that a server keeps in --data-dir."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.engine.errors import ConfigError
from quire.server.store.batches import Batches
from quire.server.store.calls import Calls
from quire.server.store.database import Database
from quire.server.store.files import Files
from quire.server.store.store import Store


@dataclass(frozen=True, slots=True)
class Data:
    store: Store
    files: Files
    batches: Batches
    calls: Calls
    close: Callable[[], None]

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of what is kept, by its kind."""
        return {"responses": self.store.size, "files": self.files.size, "journal": self.calls.size}


def open_data(folder: Path, max_bytes: int) -> Data:
    """`max_bytes`: of what the Responses API keeps, and as much again of files and of calls. Raises ConfigError."""
    database = Database(folder)
    try:
        files = Files(database, max_bytes)
    except OSError as error:
        database.close()
        raise ConfigError(f"data_dir: cannot keep files in {folder}: {error.strerror}", param="data_dir") from None
    return Data(Store(database, max_bytes), files, Batches(database), Calls(database, max_bytes), database.close)
