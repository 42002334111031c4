"""A full disk: requests that must be stored are rejected or fail, and all others are answered."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from quire.server.durability.journal import Calls
from quire.server.store.response_store import Store
from tests.server.routes.test_stored_responses import PATH, body, storing


async def test_full_disk_fails_only_stored_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with storing(tmp_path) as api:
        with monkeypatch.context() as disk:
            for store_class, name in (
                (Store, "put"),
                (Store, "mark_response_failed"),
                (Store, "append_items"),
                (Calls, "put"),
                (Calls, "update_progress"),
            ):
                disk.setattr(store_class, name, full)
            for path, request in ((PATH, body()), (PATH, body(background=True)), ("/v1/conversations", {})):
                assert "disk is full" in (await api.post(path, request, 503))["error"]["message"]
            streamed = (await api.http.post(PATH, json=body(stream=True))).text
            *_, last = events = [json.loads(each) for each in re.findall("^data: (.*)$", streamed, re.MULTILINE)]
            assert [each["sequence_number"] for each in events] == [*range(len(events))]
            assert last["type"] == "response.failed", "what is said to be complete is kept"
            assert "disk is full" in last["response"]["error"]["message"]
            assert (await api.post(PATH, body(store=False)))["status"] == "completed"
        assert (await api.post(PATH, body()))["status"] == "completed", "there is room again"
