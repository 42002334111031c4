from __future__ import annotations

import json
import logging
import sqlite3
from pathlib import Path
from typing import Any

from quire.engine.common import clock

log = logging.getLogger("quire.server")
SCHEMA_VERSION = 3
"""SQLite's user_version. 0 had one table, `kept`, with JSON objects; 1 lacked files, batches and calls; 2 lacked
indexes for eviction and retention, and garbage.
"""
_OBJECT_TABLES = """
create table objects (
    owner text not null, id text not null, kind text not null, at real not null, unfinished integer not null,
    size integer not null, count integer not null, about text not null, data blob not null, primary key (owner, id));
create index objects_by_age on objects (owner, at);
create table items (
    owner text not null, parent text not null, place integer not null, id text not null, data blob not null,
    primary key (owner, parent, place));
create unique index items_by_id on items (owner, parent, id);
"""
_BATCH_TABLES = """
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
"""
_VERSION_3_CHANGES = """
alter table objects add column created real not null default 0;
alter table objects add column items_key text;
drop index objects_by_age;
create index objects_by_eviction on objects (owner, unfinished, at);
create index objects_unfinished on objects (unfinished, owner, id) where unfinished = 1;
create index objects_by_previous on objects (owner, json_extract(about, '$.previous'))
    where json_extract(about, '$.previous') is not null;
create index responses_by_creation on objects (created) where kind = 'response' and unfinished = 0;
create table garbage (
    number integer primary key, kind text not null, owner text not null, name text not null, size integer not null);
create table bodies (owner text not null, id text not null, body blob not null, primary key (owner, id));
create index calls_by_eviction on calls (owner, ends, id);
drop index calls_by_end;
create index calls_by_end on calls (ends, owner, id);
create index files_by_purpose on files (owner, purpose, created, id);
create index files_by_expiry on files (expires, owner, id) where expires is not null;
alter table batches add column ended integer not null default 0;
update batches set ended = status in ('failed', 'completed', 'expired', 'cancelled');
drop index batches_by_status;
create index batches_open on batches (owner, created, id) where ended = 0;
create index batches_ended on batches (owner, created, id) where ended = 1;
create table line_counts (
    batch text not null primary key, completed integer not null, failed integer not null) without rowid;
insert into line_counts
    select batch, count(failed) - cast(total(failed) as integer), cast(total(failed) as integer) from lines
    group by batch;
create index lines_by_number on lines (batch, failed, number) where failed is not null;
create table upgrade (at real not null);
"""
"""- `created`: Unix seconds. 0 if an earlier version stored the object; then the time in `upgrade` counts.
- `items_key`: the items' `parent`; null means the object's id. Replacements get a new key, so that old items can be
  deleted later.
- `garbage`: rows to purge: `items` with the key `name`, or `lines` of the batch `name`. Unfinished items are listed
  too, so that they are deleted after a crash.
- `bodies`: bodies of calls. Earlier versions had them in `calls`, whose rows each progress update rewrites.
- `line_counts`: number of lines with results, for open batches.
- `upgrade`: when this version first opened an older file.
"""


def prepare_database(database: sqlite3.Connection, row_overhead_bytes: int) -> bool:
    """Returns True if an earlier version wrote the file. Raises ValueError for files of later versions, sqlite3.Error
    for other files.
    """
    database.execute("pragma journal_mode = wal")
    database.execute("pragma synchronous = normal")
    (version,) = database.execute("pragma user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise ValueError(f"a later version of Quire wrote its file (format {version}, here {SCHEMA_VERSION})")
    if version == SCHEMA_VERSION:
        return False
    database.execute("begin immediate")
    try:
        tables = ("", _BATCH_TABLES, _OBJECT_TABLES + _BATCH_TABLES)[2 - version]
        for statement in filter(str.strip, tables.split(";")):
            database.execute(statement)
        is_old = version > 0
        if database.execute("select 1 from sqlite_master where name = 'kept'").fetchone():
            is_old = True
            _convert_version_0(database, row_overhead_bytes)
        _upgrade_to_version_3(database, is_old=is_old)
        database.execute(f"pragma user_version = {SCHEMA_VERSION}")
    except BaseException:
        database.execute("rollback")
        raise
    database.execute("commit")
    return is_old


def _upgrade_to_version_3(database: sqlite3.Connection, *, is_old: bool) -> None:
    """Rewrites only rows of batches. Creating an index reads its table."""
    statements = [each.strip() for each in _VERSION_3_CHANGES.split(";") if each.strip()]
    began = clock.monotonic()
    if is_old:
        (name,) = (row[2] for row in database.execute("pragma database_list") if row[1] == "main")
        size = Path(name).stat().st_size / 2**20
        log.warning("data_dir: an earlier version wrote the file of %.0f MiB; it gets new indexes now", size)
    for number, statement in enumerate(statements, 1):
        database.execute(statement)
        if is_old and statement.startswith("create index"):
            log.info("data_dir: %d of %d changes done, %.1f s", number, len(statements), clock.monotonic() - began)
    if is_old:
        database.execute("insert into upgrade values (?)", (clock.time(),))
        log.warning(
            "data_dir: the file is ready, after %.1f s; earlier versions cannot read it", clock.monotonic() - began
        )


def _convert_version_0(database: sqlite3.Connection, row_overhead_bytes: int) -> None:
    for key in database.execute("select owner, id from kept").fetchall():
        at, unfinished, text = database.execute(
            "select at, unfinished, data from kept where owner = ? and id = ?", key
        ).fetchone()
        old_object: dict[str, Any] = json.loads(text)
        if "response" in old_object:
            kind = "response"
            items = old_object.pop("input")
            data = old_object.pop("response")
            about = {**old_object, "status": data["status"], "background": data["background"]}
        else:
            kind = "conversation"
            items = old_object.pop("items")
            about = {}
            data = {**old_object, "object": "conversation"}
        packed = [(position, item["id"], _json_bytes(item)) for position, item in enumerate(items)]
        size = (
            row_overhead_bytes + len(_json_bytes(data)) + sum(row_overhead_bytes + len(each) for _, _, each in packed)
        )
        values = (*key, kind, at, unfinished, size, len(packed), json.dumps(about), _json_bytes(data))
        database.execute("insert into objects values (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        database.executemany("insert or replace into items values (?, ?, ?, ?, ?)", ((*key, *each) for each in packed))
    database.execute("drop table kept")


def _json_bytes(value: object) -> bytes:
    return json.dumps(value).encode()
