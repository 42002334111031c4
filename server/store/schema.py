"""The tables of the database, and what an earlier version wrote."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

VERSION = 2
"""The file's user_version. Version 0 had one table, `kept`, with all of an object as one JSON text; version 1 had no
files, batches and calls."""
_OBJECTS = """
create table objects (
    owner text not null, id text not null, kind text not null, at real not null, unfinished integer not null,
    size integer not null, count integer not null, about text not null, data blob not null, primary key (owner, id));
create index objects_by_age on objects (owner, at);
create table items (
    owner text not null, parent text not null, place integer not null, id text not null, data blob not null,
    primary key (owner, parent, place));
create unique index items_by_id on items (owner, parent, id);
"""
_BATCHES = """
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


def prepare(database: sqlite3.Connection, row: int) -> None:
    """Open a file of any version up to this one. `row`: bytes that a row counts beside its data.

    Raises sqlite3.Error for what is no such file, and ValueError for one that a later version wrote.
    """
    database.execute("pragma journal_mode = wal")
    database.execute("pragma synchronous = normal")
    (version,) = database.execute("pragma user_version").fetchone()
    if version > VERSION:
        raise ValueError(f"a later version of Quire wrote its file (format {version}, here {VERSION})")
    if version == VERSION:
        return
    database.execute("begin immediate")
    try:
        tables = _BATCHES if version == 1 else _OBJECTS + _BATCHES
        for statement in filter(str.strip, tables.split(";")):
            database.execute(statement)
        if database.execute("select 1 from sqlite_master where name = 'kept'").fetchone():
            _convert(database, row)
        database.execute(f"pragma user_version = {VERSION}")
    except BaseException:
        database.execute("rollback")
        raise
    database.execute("commit")


def _convert(database: sqlite3.Connection, row: int) -> None:
    """What version 0 kept, one object at a time."""
    for key in database.execute("select owner, id from kept").fetchall():
        at, unfinished, text = database.execute(
            "select at, unfinished, data from kept where owner = ? and id = ?", key
        ).fetchone()
        given: dict[str, Any] = json.loads(text)
        if "response" in given:
            kind, items, data = "response", given.pop("input"), given.pop("response")
            about = {**given, "status": data["status"], "background": data["background"]}
        else:
            kind, items, about = "conversation", given.pop("items"), {}
            data = {**given, "object": "conversation"}
        packed = [(place, item["id"], _json(item)) for place, item in enumerate(items)]
        size = row + len(_json(data)) + sum(row + len(each) for _, _, each in packed)
        known = (*key, kind, at, unfinished, size, len(packed), json.dumps(about), _json(data))
        database.execute("insert into objects values (?, ?, ?, ?, ?, ?, ?, ?, ?)", known)
        database.executemany("insert or replace into items values (?, ?, ?, ?, ?)", ((*key, *each) for each in packed))
    database.execute("drop table kept")


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
