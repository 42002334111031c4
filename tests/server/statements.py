"""SQLite's plan and instruction count for each statement of the store."""

from __future__ import annotations

import re
import sqlite3
from typing import Any, ClassVar

from quire.server.store.schema import SCHEMA_VERSION

AT_START = {
    "select owner, sum(size) from objects group by owner",
    "select owner, sum(size) from calls group by owner",
    "select owner, id, bytes from files",
    "select total(size) from garbage",
    "select max(at) from upgrade",
}
"""Statements that run once, before the server answers: they may read whole tables."""
STEP = 10
"""Instructions per count."""
_PLANNED = ("select", "insert", "update", "delete", "with", "replace")


class Watched(sqlite3.Connection):
    """Explains each new statement, once the file has the current schema."""

    seen: ClassVar[set[str]] = set()
    faults: ClassVar[list[str]] = []
    """Statements whose work grows with what is stored, and why."""

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        self._explain(statement, values[0] if values else ())
        return super().execute(statement, *values)

    def executemany(self, statement: str, *values: Any) -> sqlite3.Cursor:
        self._explain(statement, None)
        return super().executemany(statement, *values)

    def _explain(self, statement: str, values: Any) -> None:
        text = " ".join(statement.split())
        if text in self.seen or text in AT_START or not text.lower().startswith(_PLANNED):
            return
        if super().execute("pragma user_version").fetchone() != (SCHEMA_VERSION,):
            return
        self.seen.add(text)
        if values is None:
            values = (None,) * text.count("?")
        for *_, detail in super().execute(f"explain query plan {statement}", values).fetchall():
            if re.match(r"SCAN (?!CONSTANT ROW)", detail) or "TEMP B-TREE" in detail:
                self.faults.append(f"{detail}: {text}")


class Counted(Watched):
    """Also counts each statement's instructions, in steps of STEP."""

    counts: ClassVar[dict[str, int]] = {}
    """By statement: the highest count of one execution."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._statement = ""
        self._instructions = 0
        self.set_progress_handler(self._count, STEP)

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        self._begin(statement)
        return super().execute(statement, *values)

    def executemany(self, statement: str, *values: Any) -> sqlite3.Cursor:
        self._begin(statement)
        return super().executemany(statement, *values)

    def _begin(self, statement: str) -> None:
        """Record the count of the statement before, whose rows have been fetched by now."""
        self.counts[self._statement] = max(self.counts.get(self._statement, 0), self._instructions)
        self._statement, self._instructions = " ".join(statement.split()), 0

    def _count(self) -> int:
        self._instructions += 1
        return 0
