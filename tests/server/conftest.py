from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest

from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed
from tests.server.statements import Watched


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    """A server with an engine that answers with hash-derived bytes, mostly letters."""
    async with open_api(FakeEngine(hashed(b"abcdefghijklmnop .\xc3\xa9"))) as opened:
        yield opened


@pytest.fixture(scope="module")
async def idle_api() -> AsyncIterator[Api]:
    """Like `api`, but shared by all tests of a file. They send only what is rejected before it reaches the engine."""
    async with open_api(FakeEngine(hashed(b"abc"))) as opened:
        yield opened
        assert not opened.engine.seen


@pytest.fixture(autouse=True)
def statements_read_no_whole_tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks every statement that a test makes the store run."""
    Watched.faults.clear()
    monkeypatch.setattr("sqlite3.connect", partial(sqlite3.connect, factory=Watched))
    yield
    assert not Watched.faults
