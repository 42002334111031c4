"""The journal: what each call is that may be answered again, and the tokens that it has.

It has no keys and values: these are computed again, to the same bits.
"""

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

from quire.engine import clock
from quire.server.budget import OwnerSizes
from quire.server.store.database import ROW, Database
from quire.server.store.garbage import BATCH_BYTES, OBJECTS
from quire.server.store.progress import Progress
from quire.server.store.room import Room
from quire.server.store.tail import PREFIX, Tokens, left

log = logging.getLogger("quire.server")
_AWAITED = "exists (select 1 from objects where owner = calls.owner and id = calls.id and unfinished = 1)"
"""Of a call: whether it is a response that has not ended."""
_FIRST = (float("-inf"), "")
"""Before the end and id of all calls."""
_STEPS = 2
"""Transactions by which a call makes room for itself: its first token waits for them."""
_NOTES = 16
"""Calls whose progress is written in one transaction."""
CLAIM_SECONDS = 30.0
"""For so long at most nobody else may begin what a request has begun to prepare."""


class Pins(msgspec.Struct, frozen=True):
    """What an answer depends on beside its request."""

    id: str
    """The server's own of the call."""
    name: str
    """The answer's, where its caller chose one."""
    created: int
    """Seconds of the Unix clock."""
    seed: int | None
    adapter: str = ""
    """Digest of its adapter."""
    kernels: str = ""
    """The model's fingerprint: weights, and what computes."""
    background: bool = False
    """Whether it is a response that goes on without its caller."""
    model: str = ""
    """The name of the model that it is for, where there are several; "" in journals of before: as the body says."""
    before: tuple[str, ...] = ()
    """Fingerprints of the models that computed its first tokens, where other models than `kernels` did."""
    given: str = ""
    """Digest of weights and prompts, without which it cannot go on; "" in journals of before."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    body: bytes
    pins: Pins
    key: str | None = None
    """Its Idempotency-Key."""
    progress: Progress = msgspec.field(default_factory=Progress)


def _call(tokens: Tokens) -> tuple[str, str]:
    return tokens.owner, tokens.id


class Note(NamedTuple):
    """What a call has so far."""

    owner: str
    id: str
    progress: Progress
    ends: float
    """When its row does, of the Unix clock."""
    answered: bool
    """Whether its answer has ended."""


class _Claim(NamedTuple):
    """Of a call that is about to be answered again."""

    process: str
    attempt: int
    until: float
    """Of time.monotonic()."""


class Calls:
    """Threads may use it at the same time; each method is one transaction, but for what has to make room.

    One whose time is over is forgotten, but not while it is answered, nor while its response has not ended: the machine
    may have been off, or asleep, for days. When they take more than `max_bytes` together, those of the owner with most
    bytes are forgotten that end first; those that are answered last. Which process answers a call is known as long as
    this one lives."""

    def __init__(self, database: Database, max_bytes: int, living: Container[str] = ()) -> None:
        """`living`: processes that go on, whose tails are theirs."""
        self._database = database
        with database.reading() as connection:
            rows = connection.execute("select owner, sum(size) from calls group by owner").fetchall()
        self._sizes = OwnerSizes(dict(rows))
        self._swept: tuple[float, str, str] | None = None
        """The end, owner and id of the call that `sweep` looked at last; None: it begins with the first."""
        self._held: dict[tuple[str, str], str] = {}
        """By owner and id: the process that answers a call."""
        eviction = partial(_Eviction, self._sizes, self._drop, self._held)
        self.room = Room(database, max_bytes, self._sizes, None, eviction)
        self._claims: dict[tuple[str, str], _Claim] = {}
        self._claiming = threading.Lock()
        for path in database.folder.glob(f"{PREFIX}*"):  # of a server that was killed
            if path.name.removeprefix(PREFIX) not in living:
                self._take_up("", path)

    @property
    def size(self) -> int:
        """Bytes of all calls."""
        return self._sizes.total()

    def put(self, owner: str, call: Call, ends: float, process: str) -> bool:
        """Note a call that `process` answers from now on. ends: when it is forgotten, by the Unix clock. False, and not
        noted, where another call has its key. A call that cannot be written to the disk is answered all the same."""
        self._held[owner, call.pins.id] = process
        self._claims.pop((owner, call.pins.id), None)
        if not (fresh := self._put(owner, call, ends)):
            self.release(owner, call.pins.id, process)
        return fresh

    def _put(self, owner: str, call: Call, ends: float) -> bool:
        size = ROW + len(call.body)
        self.room.make(size, steps=_STEPS)
        row = (owner, call.pins.id, call.path, b"", msgspec.json.encode(call.pins), call.key, ends, size)
        with self._database.writing(self._sizes) as connection:
            if call.key is not None:
                query = f"select id, ends < ? and not {_AWAITED} from calls where owner = ? and name = ?"
                known = connection.execute(query, (clock.time(), owner, call.key)).fetchone()
                if known is not None and known[0] != call.pins.id:
                    if not known[1] or (owner, known[0]) in self._held:
                        return False
                    self._drop(connection, owner, known[0])
            self._drop(connection, owner, call.pins.id)
            connection.execute(
                "insert into calls values (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*row, msgspec.msgpack.encode(call.progress))
            )
            connection.execute("insert into bodies values (?, ?, ?)", (owner, call.pins.id, call.body))
            self._sizes.add(owner, size)
            return True

    def note(self, known: Sequence[Note], process: str) -> None:
        """What calls have so far that this process answers. In several transactions, if they are many."""
        update = "update calls set progress = ?, ends = ? where owner = ? and id = ?"
        try:
            for begin in range(0, len(known), _NOTES):
                with self._database.writing() as connection:
                    connection.executemany(
                        update,
                        [
                            (msgspec.msgpack.encode(each.progress), each.ends, each.owner, each.id)
                            for each in known[begin : begin + _NOTES]
                            if self._held.get((each.owner, each.id), process) == process
                        ],
                    )
        finally:
            for each in known:
                if each.answered:
                    self.release(each.owner, each.id, process)

    def hold(self, process: str, calls: Iterable[tuple[str, str]]) -> None:
        """A process answers these already, but for those that another one does."""
        for each in calls:
            self._held.setdefault(each, process)

    def holder(self, owner: str, id: str) -> str | None:
        """The process that answers a call; None: none does."""
        return self._held.get((owner, id))

    def claim(self, owner: str, id: str, process: str, attempt: int) -> bool:
        """An attempt of this process is about to answer a call again, and is the only one until `put`, `give_up`, or
        CLAIM_SECONDS from now. False while another one is."""
        now = clock.monotonic()
        with self._claiming:
            if (other := self._claims.get((owner, id))) is not None and other.until > now:
                return False
            self._claims[owner, id] = _Claim(process, attempt, now + CLAIM_SECONDS)
            return True

    def give_up(self, owner: str, id: str, attempt: int) -> None:
        """This attempt answers it not. Does nothing once it does."""
        with self._claiming:
            if (claim := self._claims.get((owner, id))) is not None and claim.attempt == attempt:
                del self._claims[owner, id]

    def release(self, owner: str, id: str, process: str) -> None:
        """This process answers it no longer."""
        if self._held.get((owner, id)) == process:
            del self._held[owner, id]

    def gone(self, process: str) -> None:
        """It has ended, and answers nothing any more. What it had not noted is in its tail."""
        self._take_up(process, self._database.folder / f"{PREFIX}{process}")
        for key in [key for key, holder in list(self._held.items()) if holder == process]:
            self._held.pop(key, None)
        with self._claiming:
            self._claims = {key: claim for key, claim in self._claims.items() if claim.process != process}

    def find(self, owner: str, id: str) -> Call | None:
        return self._found("id", owner, id)

    def of_key(self, owner: str, key: str) -> Call | None:
        return self._found("name", owner, key)

    def delete(self, owner: str, id: str, *, named: bool = True) -> None:
        """It is not answered again. `named`: one that has an Idempotency-Key neither; else its row stays."""
        with self._database.writing(self._sizes) as connection:
            where = "owner = ? and id = ?" if named else "owner = ? and id = ? and name is null"
            if connection.execute(f"select 1 from calls where {where}", (owner, id)).fetchone() is not None:
                self._drop(connection, owner, id)
        self._held.pop((owner, id), None)

    def sweep(self) -> bool:
        """Forget some of those whose time is over, in one transaction. Returns False after the last one."""
        query = f"""select ends, owner, id, size, {_AWAITED} from calls
            where ends < ? and (ends, owner, id) > (?, ?, ?) order by ends, owner, id limit ?"""
        start = self._swept or (float("-inf"), "", "")
        with self._database.reading() as connection:
            is_due = connection.execute(query, (clock.time(), *start, 1)).fetchone() is not None
        if is_due:
            with self._database.writing(self._sizes) as connection:
                rows, freed = connection.execute(query, (clock.time(), *start, OBJECTS)).fetchall(), 0
                for ends, owner, id, size, awaited in rows:
                    if freed >= BATCH_BYTES:
                        break
                    start = (ends, owner, id)
                    if not awaited and (owner, id) not in self._held:
                        self._drop(connection, owner, id)
                        freed += size
                is_due = len(rows) == OBJECTS or (bool(rows) and start != rows[-1][:3])
        self._swept = start if is_due else None
        return is_due

    def _take_up(self, process: str, path: Path) -> None:
        """Copy the tail of a process that has ended to the journal, and delete it. Calls that another process has taken
        over are left out: it has their tokens. Tokens of a tail that cannot be read are computed again."""
        try:
            for (owner, id), tokens in groupby(sorted(left(path), key=_call), _call):
                call = self.find(owner, id)
                if call is None or self._held.get((owner, id), process) != process:
                    continue
                for each in tokens:
                    call.progress.take(each.choice, each.place, each.ids, each.end)
                with self._database.writing() as connection:
                    note = "update calls set progress = ? where owner = ? and id = ?"
                    connection.execute(note, (msgspec.msgpack.encode(call.progress), owner, id))
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except (OSError, sqlite3.OperationalError) as error:
            log.error("what streams got last is not in the journal: data_dir cannot be read or written: %s", error)

    def _found(self, column: str, owner: str, value: str) -> Call | None:
        body = "coalesce((select body from bodies where owner = calls.owner and id = calls.id), body)"
        columns = f"id, ends < ? and not {_AWAITED}, path, {body}, pins, name, progress"
        query = f"select {columns} from calls where owner = ? and {column} = ?"
        with self._database.reading() as connection:
            row = connection.execute(query, (clock.time(), owner, value)).fetchone()
        if row is None:
            return None
        id, over, path, body, pins, key, progress = row
        if over and (owner, id) not in self._held:
            return None
        known = msgspec.msgpack.decode(progress, type=Progress)
        return Call(path=path, body=bytes(body), pins=msgspec.json.decode(pins, type=Pins), key=key, progress=known)

    def _drop(self, connection: sqlite3.Connection, owner: str, id: str) -> None:
        query = "delete from calls where owner = ? and id = ? returning size"
        if (row := connection.execute(query, (owner, id)).fetchone()) is not None:
            connection.execute("delete from bodies where owner = ? and id = ?", (owner, id))
            self._sizes.add(owner, -row[0])


class _Eviction:
    """Evicts calls of the largest owner, as Room asks for it: those that end first; after them responses that have not
    ended, and calls that are answered last. One step looks at some calls, and the next one goes on from there."""

    def __init__(
        self,
        sizes: OwnerSizes,
        drop: Callable[[sqlite3.Connection, str, str], None],
        held: Container[tuple[str, str]],
    ) -> None:
        """`held`: owners and ids of the calls that are answered."""
        self._sizes = sizes
        self._drop = drop
        self._held = held
        self._owner = ""
        self._place: tuple[float, str] = _FIRST
        self._spares_awaited = True
        self._spares_held = True

    def __call__(self, connection: sqlite3.Connection, target: int) -> bool:
        owner = self._sizes.largest()
        if owner != self._owner:
            self._owner, self._place = owner, _FIRST
            self._spares_awaited, self._spares_held = True, True
        query = f"""select ends, id, size, {_AWAITED} from calls where owner = ? and (ends, id) > (?, ?)
            order by ends, id limit ?"""
        rows = connection.execute(query, (owner, *self._place, OBJECTS)).fetchall()
        freed = 0
        for ends, id, size, awaited in rows:
            self._place = (ends, id)
            if (awaited and self._spares_awaited) or ((owner, id) in self._held and self._spares_held):
                continue
            self._drop(connection, owner, id)
            freed += size
            if freed >= min(target, BATCH_BYTES) or self._sizes.largest() != owner:
                return True
        if len(rows) < OBJECTS:
            self._place = _FIRST
            self._spares_awaited, self._spares_held = False, self._spares_awaited
        return True
