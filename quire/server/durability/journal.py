"""Calls that can be replayed or resumed, and their tokens. A replay recomputes the same KV, bit for bit."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.engine.common import clock
from quire.server.cache_diagnostics import CacheDiagnosis
from quire.server.durability.progress import CallProgress
from quire.server.durability.write_ahead_log import LOG_FILE_PREFIX, LoggedTokens, read_logged_tokens
from quire.server.shared_capacity import BytesByOwner
from quire.server.store.database import ROW_OVERHEAD_BYTES, Database
from quire.server.store.garbage import MAX_TRANSACTION_BYTES, MAX_TRANSACTION_OBJECTS
from quire.server.store.storage_quota import StorageQuota

log = logging.getLogger("quire.server")
_IS_UNFINISHED_RESPONSE = (
    "exists (select 1 from objects where owner = calls.owner and id = calls.id and unfinished = 1)"
)
_BEFORE_FIRST = (float("-inf"), "")
_EVICTION_STEPS = 2
"""A new call's first token waits for at most this many eviction steps, unless HARD_LIMIT_RATIO would be exceeded."""
_UPDATES_PER_TRANSACTION = 16
CLAIM_SECONDS = 30.0


class PinnedReplayFields(msgspec.Struct, frozen=True):
    id: str
    name: str
    """The answer's id, if the caller chose it."""
    created: int
    """Unix seconds."""
    seed: int | None
    adapter: str = ""
    kernels: str = ""
    """Fingerprint of weights and kernels."""
    background: bool = False
    model: str = ""
    """Empty in older journals."""
    before: tuple[str, ...] = ()
    """Fingerprints of other weights or kernels that computed the first tokens."""
    given: str = ""
    """Digest of weights and prompts, needed to resume; empty in old journals."""
    cache_diagnosis: CacheDiagnosis | None = None


class JournaledCall(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    body: bytes
    pins: PinnedReplayFields
    key: str | None = None
    progress: CallProgress = msgspec.field(default_factory=CallProgress)


def _logged_call_key(tokens: LoggedTokens) -> tuple[str, str]:
    return tokens.owner, tokens.id


class ProgressUpdate(NamedTuple):
    owner: str
    id: str
    progress: CallProgress
    expires_at: float
    """Unix seconds at which the call may be deleted."""
    is_complete: bool


class _AttemptClaim(NamedTuple):
    process: str
    attempt: int
    expires_at: float
    """time.monotonic()."""


class Calls:
    """Thread-safe. Methods are single transactions, unless they make room.

    Expired calls are deleted, except while they are answered or their response is unfinished, because the machine may
    have been off for days.
    """

    def __init__(self, database: Database, max_bytes: int, live_processes: Container[str] = ()) -> None:
        """`live_processes` still write their token logs. The tokens of other logs are recovered."""
        self._database = database
        with database.read_connection() as connection:
            rows = connection.execute("select owner, sum(size) from calls group by owner").fetchall()
        self._sizes = BytesByOwner(dict(rows))
        self._sweep_position: tuple[float, str, str] | None = None
        """(expiry, owner, id) to continue after; None: the start."""
        self._answering_processes: dict[tuple[str, str], str] = {}
        eviction = partial(_CallEviction, self._sizes, self._delete_call, self._answering_processes)
        self.quota = StorageQuota(database, max_bytes, self._sizes, None, eviction)
        self._claims: dict[tuple[str, str], _AttemptClaim] = {}
        self._claims_lock = threading.Lock()
        for path in database.folder.glob(f"{LOG_FILE_PREFIX}*"):  # left by a killed server
            if path.name.removeprefix(LOG_FILE_PREFIX) not in live_processes:
                self._recover_token_log("", path)

    @property
    def stored_bytes(self) -> int:
        return self._sizes.total_bytes()

    def put(self, owner: str, call: JournaledCall, expires_at: float, process: str) -> bool:
        """From now on, `process` counts as answering the call, even if the write fails. `expires_at` is in Unix
        seconds. Returns False if another call has the same key.
        """
        self._answering_processes[owner, call.pins.id] = process
        self._claims.pop((owner, call.pins.id), None)
        if not (is_new := self._insert_call(owner, call, expires_at)):
            self.remove_answering_process(owner, call.pins.id, process)
        return is_new

    def _insert_call(self, owner: str, call: JournaledCall, expires_at: float) -> bool:
        size = ROW_OVERHEAD_BYTES + len(call.body)
        self.quota.make_room(size, max_steps=_EVICTION_STEPS)
        row = (owner, call.pins.id, call.path, b"", msgspec.json.encode(call.pins), call.key, expires_at, size)
        with self._database.write_transaction(self._sizes) as connection:
            if call.key is not None:
                query = f"select id, ends < ? and not {_IS_UNFINISHED_RESPONSE} from calls where owner = ? and name = ?"
                existing = connection.execute(query, (clock.time(), owner, call.key)).fetchone()
                if existing is not None and existing[0] != call.pins.id:
                    if not existing[1] or (owner, existing[0]) in self._answering_processes:
                        return False
                    self._delete_call(connection, owner, existing[0])
            self._delete_call(connection, owner, call.pins.id)
            connection.execute(
                "insert into calls values (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, msgspec.msgpack.encode(call.progress))
            )
            connection.execute("insert into bodies values (?, ?, ?)", (owner, call.pins.id, call.body))
            self._sizes.add_bytes(owner, size)
            return True

    def update_progress(self, updates: Sequence[ProgressUpdate], process: str) -> None:
        update = "update calls set progress = ?, ends = ? where owner = ? and id = ?"
        try:
            for begin in range(0, len(updates), _UPDATES_PER_TRANSACTION):
                with self._database.write_transaction() as connection:
                    connection.executemany(
                        update,
                        [
                            (msgspec.msgpack.encode(each.progress), each.expires_at, each.owner, each.id)
                            for each in updates[begin : begin + _UPDATES_PER_TRANSACTION]
                            if self._answering_processes.get((each.owner, each.id), process) == process
                        ],
                    )
        finally:
            for each in updates:
                if each.is_complete:
                    self.remove_answering_process(each.owner, each.id, process)

    def register_answering_process(self, process: str, calls: Iterable[tuple[str, str]]) -> None:
        for each in calls:
            self._answering_processes.setdefault(each, process)

    def answering_process(self, owner: str, id: str) -> str | None:
        return self._answering_processes.get((owner, id))

    def try_claim_call(self, owner: str, id: str, process: str, attempt: int) -> bool:
        """The claim lasts until `put`, `release_claim` or CLAIM_SECONDS."""
        now = clock.monotonic()
        with self._claims_lock:
            if (other := self._claims.get((owner, id))) is not None and other.expires_at > now:
                return False
            self._claims[owner, id] = _AttemptClaim(process, attempt, now + CLAIM_SECONDS)
            return True

    def release_claim(self, owner: str, id: str, attempt: int) -> None:
        with self._claims_lock:
            if (claim := self._claims.get((owner, id))) is not None and claim.attempt == attempt:
                del self._claims[owner, id]

    def remove_answering_process(self, owner: str, id: str, process: str) -> None:
        if self._answering_processes.get((owner, id)) == process:
            del self._answering_processes[owner, id]

    def handle_process_end(self, process: str) -> None:
        self._recover_token_log(process, self._database.folder / f"{LOG_FILE_PREFIX}{process}")
        for key in [key for key, holder in list(self._answering_processes.items()) if holder == process]:
            self._answering_processes.pop(key, None)
        with self._claims_lock:
            self._claims = {key: claim for key, claim in self._claims.items() if claim.process != process}

    def find(self, owner: str, id: str) -> JournaledCall | None:
        return self._select_call("id", owner, id)

    def find_by_idempotency_key(self, owner: str, idempotency_key: str) -> JournaledCall | None:
        return self._select_call("name", owner, idempotency_key)

    def delete(self, owner: str, id: str, *, include_keyed: bool = True) -> None:
        """If `include_keyed` is False, a call with an Idempotency-Key stays."""
        with self._database.write_transaction(self._sizes) as connection:
            where = "owner = ? and id = ?" if include_keyed else "owner = ? and id = ? and name is null"
            if connection.execute(f"select 1 from calls where {where}", (owner, id)).fetchone() is not None:
                self._delete_call(connection, owner, id)
        self._answering_processes.pop((owner, id), None)

    def delete_expired_calls(self) -> bool:
        """Runs one transaction. Returns False if no more calls are due."""
        query = f"""select ends, owner, id, size, {_IS_UNFINISHED_RESPONSE} from calls
            where ends < ? and (ends, owner, id) > (?, ?, ?) order by ends, owner, id limit ?"""
        start = self._sweep_position or (float("-inf"), "", "")
        with self._database.read_connection() as connection:
            is_due = connection.execute(query, (clock.time(), *start, 1)).fetchone() is not None
        if is_due:
            with self._database.write_transaction(self._sizes) as connection:
                rows, freed = connection.execute(query, (clock.time(), *start, MAX_TRANSACTION_OBJECTS)).fetchall(), 0
                for expires_at, owner, id, size, awaited in rows:
                    if freed >= MAX_TRANSACTION_BYTES:
                        break
                    start = (expires_at, owner, id)
                    if not awaited and (owner, id) not in self._answering_processes:
                        self._delete_call(connection, owner, id)
                        freed += size
                is_due = len(rows) == MAX_TRANSACTION_OBJECTS or (bool(rows) and start != rows[-1][:3])
        self._sweep_position = start if is_due else None
        return is_due

    def _recover_token_log(self, process: str, path: Path) -> None:
        """Skips calls that another process has taken over with their tokens. Tokens of an unreadable log are
        recomputed.
        """
        try:
            for (owner, id), tokens in groupby(
                sorted(read_logged_tokens(path), key=_logged_call_key), _logged_call_key
            ):
                call = self.find(owner, id)
                if call is None or self._answering_processes.get((owner, id), process) != process:
                    continue
                for each in tokens:
                    call.progress.merge_tokens(each.choice, each.position, each.token_ids, each.finish)
                with self._database.write_transaction() as connection:
                    update = "update calls set progress = ? where owner = ? and id = ?"
                    connection.execute(update, (msgspec.msgpack.encode(call.progress), owner, id))
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except (OSError, sqlite3.OperationalError) as error:
            log.error(
                "the last tokens of streams are not in the journal: data_dir cannot be read or written: %s", error
            )

    def _select_call(self, column: str, owner: str, value: str) -> JournaledCall | None:
        body = "coalesce((select body from bodies where owner = calls.owner and id = calls.id), body)"
        columns = f"id, ends < ? and not {_IS_UNFINISHED_RESPONSE}, path, {body}, pins, name, progress"
        query = f"select {columns} from calls where owner = ? and {column} = ?"
        with self._database.read_connection() as connection:
            row = connection.execute(query, (clock.time(), owner, value)).fetchone()
        if row is None:
            return None
        id, is_expired, path, body, pins, key, progress = row
        if is_expired and (owner, id) not in self._answering_processes:
            return None
        decoded_progress = msgspec.msgpack.decode(progress, type=CallProgress)
        return JournaledCall(
            path=path,
            body=bytes(body),
            pins=msgspec.json.decode(pins, type=PinnedReplayFields),
            key=key,
            progress=decoded_progress,
        )

    def _delete_call(self, connection: sqlite3.Connection, owner: str, id: str) -> None:
        query = "delete from calls where owner = ? and id = ? returning size"
        if (row := connection.execute(query, (owner, id)).fetchone()) is not None:
            connection.execute("delete from bodies where owner = ? and id = ?", (owner, id))
            self._sizes.add_bytes(owner, -row[0])


class _CallEviction:
    """Evicts the largest owner's calls in order of expiry, in up to three passes: the first spares unfinished responses
    and calls being answered, the second only the latter, the third none.
    """

    def __init__(
        self,
        sizes: BytesByOwner,
        delete_call: Callable[[sqlite3.Connection, str, str], None],
        answered_calls: Container[tuple[str, str]],
    ) -> None:
        self._sizes = sizes
        self._delete_call = delete_call
        self._answered_calls = answered_calls
        self._owner = ""
        self._position: tuple[float, str] = _BEFORE_FIRST
        self._spares_unfinished = True
        self._spares_answered = True

    def __call__(self, connection: sqlite3.Connection, target: int) -> bool:
        owner = self._sizes.largest_owner()
        if owner != self._owner:
            self._owner, self._position = owner, _BEFORE_FIRST
            self._spares_unfinished, self._spares_answered = True, True
        query = f"""select ends, id, size, {_IS_UNFINISHED_RESPONSE} from calls where owner = ? and (ends, id) > (?, ?)
            order by ends, id limit ?"""
        rows = connection.execute(query, (owner, *self._position, MAX_TRANSACTION_OBJECTS)).fetchall()
        freed = 0
        for expires_at, id, size, awaited in rows:
            self._position = (expires_at, id)
            if (awaited and self._spares_unfinished) or ((owner, id) in self._answered_calls and self._spares_answered):
                continue
            self._delete_call(connection, owner, id)
            freed += size
            if freed >= min(target, MAX_TRANSACTION_BYTES) or self._sizes.largest_owner() != owner:
                return True
        if len(rows) < MAX_TRANSACTION_OBJECTS:
            self._position = _BEFORE_FIRST
            self._spares_unfinished, self._spares_answered = False, self._spares_unfinished
        return True
