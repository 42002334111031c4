"""What is stored stays, is its owner's alone, and is bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.errors import ConfigError
from quire.server.store import FILE, Store, reading

BIG = 1 << 30


def test_what_is_stored_survives_and_is_its_owners_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "new" / "folder", BIG)
    store.put("a", "1", {"x": "é\ud800"})
    store.put("b", "1", {"x": 2})
    assert (store.get("a", "1"), store.get("b", "1"), store.get("c", "1")) == ({"x": "é\ud800"}, {"x": 2}, None)
    with reading(tmp_path / "new" / "folder") as get:
        assert (get("a", "1"), get("c", "1")) == ({"x": "é\ud800"}, None)
    assert (tmp_path / "new" / "folder" / FILE).stat().st_mode & 0o077 == 0, "others may not read it"
    store.close()
    again = Store(tmp_path / "new" / "folder", BIG)
    assert again.get("b", "1") == {"x": 2}
    assert again.delete("b", "1")
    assert not again.delete("b", "1")
    assert (again.get("a", "1"), again.get("b", "1")) == ({"x": "é\ud800"}, None)
    again.close()


def test_one_server_at_a_time(tmp_path: Path) -> None:
    store = Store(tmp_path, BIG)
    with pytest.raises(ConfigError, match="another server"):
        Store(tmp_path, BIG)
    store.close()
    Store(tmp_path, BIG).close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="data_dir"):
        Store(tmp_path / "file", BIG)
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match="data_dir"):
        Store(tmp_path, BIG)


def test_the_oldest_of_the_largest_owner_goes_first(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    store.put("small", "first", {"x": "y" * 100})
    for number in range(20):
        store.put("large", str(number), {"x": "y" * 100})
        assert store.size <= 1000
    assert store.get("small", "first") is not None, "another's flood takes nothing away"
    assert store.get("large", "0") is None
    assert store.get("large", "19") is not None
    store.put("large", "19", {"x": ""})
    kept = [number for number in range(20) if store.get("large", str(number)) is not None]
    assert kept == list(range(kept[0], 20))
    size = store.size
    store.close()
    again = Store(tmp_path, 1000)
    assert again.size == size
    again.close()


def test_changes_and_what_nobody_will_end(tmp_path: Path) -> None:
    store = Store(tmp_path, BIG)
    store.put("a", "1", {"n": 1}, unfinished=True)
    store.put("a", "2", {"n": 1})

    def more(data: dict[str, Any]) -> dict[str, Any]:
        return {"n": data["n"] + 1}

    assert store.update("a", "2", more) == {"n": 2}
    assert store.update("a", "3", more) is None
    store.end_unfinished(more)
    store.end_unfinished(more)
    assert (store.get("a", "1"), store.get("a", "2")) == ({"n": 2}, {"n": 2})
    store.close()
