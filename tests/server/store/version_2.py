"""A data directory of schema version 2, the last before objects were deleted in parts."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from quire.server.store.database import DATABASE_FILE, ROW_OVERHEAD_BYTES

TABLES = """
create table objects (
    owner text not null, id text not null, kind text not null, at real not null, unfinished integer not null,
    size integer not null, count integer not null, about text not null, data blob not null, primary key (owner, id));
create index objects_by_age on objects (owner, at);
create table items (
    owner text not null, parent text not null, place integer not null, id text not null, data blob not null,
    primary key (owner, parent, place));
create unique index items_by_id on items (owner, parent, id);
create table files (
    owner text not null, id text not null, created integer not null, expires integer, bytes integer not null,
    name text not null, purpose text not null, primary key (owner, id));
create index files_by_age on files (owner, created, id);
create table batches (
    owner text not null, id text not null, created integer not null, ends integer not null, status text not null,
    data blob not null, primary key (owner, id));
create index batches_by_age on batches (owner, created, id);
create index batches_by_status on batches (status);
create table lines (
    batch text not null, place integer not null, number integer not null, start integer not null,
    length integer not null, custom_id text not null, failed integer, result blob, primary key (batch, place))
    without rowid;
create index lines_left on lines (batch, place) where failed is null;
create table calls (
    owner text not null, id text not null, path text not null, body blob not null, pins blob not null,
    name text, ends real not null, size integer not null, progress blob not null, primary key (owner, id));
create unique index calls_by_name on calls (owner, name) where name is not null;
create index calls_by_end on calls (ends);
pragma user_version = 2;
"""


def write_version_2(folder: Path, responses: Mapping[str, str | None], at: float, *, items: int = 1) -> None:
    """Store responses of owner `a`; `responses` maps each id to the id of the response that it continues."""
    with closing(sqlite3.connect(folder / DATABASE_FILE)) as database:
        database.executescript(TABLES)
        for id, previous in responses.items():
            about = json.dumps({"status": "completed", "background": False, "previous": previous, "events": 0})
            packed = [("a", id, place, f"i{place}", b'{"id":"i%d"}' % place) for place in range(items)]
            size = ROW_OVERHEAD_BYTES + 2 + sum(ROW_OVERHEAD_BYTES + len(row[4]) for row in packed)
            row = ("a", id, "response", at, 0, size, items, about, b"{}")
            database.execute("insert into objects values (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            database.executemany("insert into items values (?, ?, ?, ?, ?)", packed)
        database.commit()
