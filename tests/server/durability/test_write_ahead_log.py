"""The write-ahead log holds what a killed process had sent, and nothing else."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from quire.server.durability import write_ahead_log
from quire.server.durability.journal import Calls, JournaledCall, PinnedReplayFields, ProgressUpdate
from quire.server.durability.progress import CallProgress, ChoiceFinish
from quire.server.durability.write_ahead_log import LoggedTokens, WriteAheadLog, read_logged_tokens
from quire.server.store.database import Database

PINS = PinnedReplayFields(id="one", name="", created=0, seed=1)
STOP = ChoiceFinish("stop", 3, came_with_token=True)


def open_journal(folder: Path) -> tuple[Database, Calls]:
    database = Database(folder)
    return database, Calls(database, 1 << 20)


def test_journal_recovers_tokens_from_write_ahead_log(tmp_path: Path) -> None:
    database, journal = open_journal(tmp_path)
    call = JournaledCall(
        path="/v1/completions", body=b"{}", pins=PINS, progress=CallProgress([[], []], [-1, -1], [None, None])
    )
    journal.put("me", call, 4e9, "a")
    log = WriteAheadLog(tmp_path, "a")
    number = log.log_call("me", "one", 2)
    log.log_tokens(number, 0, 0, [5, 6], None)
    journal.update_progress(
        [ProgressUpdate("me", "one", CallProgress([[5], []], [0, -1], [None, None]), 4e9, is_complete=False)], "a"
    )
    log.log_step([number + 1, 0, 8, number, 2, 7, log.log_call("me", "unknown"), 0, 1])
    log.log_tokens(number, 0, 3, [9], STOP)
    log.log_tokens(log.log_call("me", "unknown"), 0, 0, [1], None)
    database.close()  # the state after a kill: the log is not closed
    database, journal = open_journal(tmp_path)
    journaled = journal.find("me", "one")
    assert journaled is not None
    assert journaled.progress == CallProgress([[5, 6, 7, 9], [8]], [0, -1], [STOP, None])
    assert not list(tmp_path.glob("tail-*"))
    database.close()


def test_write_ahead_log_reads_halves_of_other_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade may read a log of a version with smaller halves."""
    monkeypatch.setattr(write_ahead_log, "HALF_BYTES", 4096)
    log = WriteAheadLog(tmp_path, "a")
    number = log.log_call("me", "one")
    for token in range(100):
        log.log_step([number, token, token])
        if token == 90:
            assert log.switch_half_if_filling([(number, "me", "one", 1)])
    monkeypatch.undo()
    assert [each.position for each in read_logged_tokens(tmp_path / "tail-a")] == list(range(100))
    log.close_and_delete()


def test_write_ahead_log_reads_single_token_records(tmp_path: Path) -> None:
    log, path = WriteAheadLog(tmp_path, "a"), tmp_path / "tail-a"
    number = log.log_call("me", "one")
    content = bytearray(path.read_bytes())
    (place,) = struct.unpack_from("<Q", content, 36)
    used = place % (1 << 32)
    for at in range(3):
        numbers = number, 1, at, 7
        check = number ^ 1 ^ at ^ 7 ^ 0x9E3779B9
        struct.pack_into("<6I", content, 52 + used + 24 * at, 0, check, *numbers)
    struct.pack_into("<Q", content, 36, place + 3 * 24)
    path.write_bytes(content)
    assert list(read_logged_tokens(path)) == [LoggedTokens("me", "one", 1, at, (7,), None) for at in range(3)]
    log.close_and_delete()


def test_write_ahead_log_reading_stops_at_unknown_record_type(tmp_path: Path) -> None:
    """After a downgrade: the start must not fail, and what follows is computed again."""

    class Later(write_ahead_log.TokensRecord, frozen=True, tag="later", array_like=True):
        pass

    log = WriteAheadLog(tmp_path, "a")
    number = log.log_call("me", "one")
    log.log_step([number, 0, 5])
    log._append_record(Later(number, 0, 1, [6], None))
    log.log_step([number, 2, 7])
    assert list(read_logged_tokens(tmp_path / "tail-a")) == [LoggedTokens("me", "one", 0, 0, (5,), None)]
    log.close_and_delete()


def test_write_ahead_log_keeps_tokens_since_switch_of_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_ahead_log, "HALF_BYTES", 4096)
    log, expected, switched_at = WriteAheadLog(tmp_path, "a"), list[int](), 0
    number = log.log_call("me", "one")
    for token in range(2000):
        if token % 50 == 0 and log.switch_half_if_filling([(number, "me", "one", 1)]):
            switched_at = token
            assert [id for each in read_logged_tokens(tmp_path / "tail-a") for id in each.token_ids][-1:] == expected[
                -1:
            ]
            log.discard_other_half()
        log.log_step([number, token, token])
        expected.append(token)
    logged = [(each.position, *each.token_ids) for each in read_logged_tokens(tmp_path / "tail-a")]
    assert switched_at > 1500
    assert logged[-1] == (1999, 1999)
    assert set(range(switched_at, 2000)) <= {place for place, _ in logged}, "what is not noted is all there"
    log.close_and_delete()
    assert not (tmp_path / "tail-a").exists()


def test_write_ahead_log_drops_other_boot_and_excess_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_ahead_log, "HALF_BYTES", 256)
    log = WriteAheadLog(tmp_path, "a")
    number = log.log_call("me", "one")
    for token in range(100):
        log.log_step([number, token, token])
    positions = [each.position for each in read_logged_tokens(tmp_path / "tail-a")]
    assert positions == list(range(len(positions)))
    assert 5 < len(positions) < 100
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr(write_ahead_log, "BOOT_ID_FILE", tmp_path / "boot")
    assert not list(read_logged_tokens(tmp_path / "tail-a"))
    (tmp_path / "tail-b").write_bytes(b"short")
    assert not list(read_logged_tokens(tmp_path / "tail-b"))


def test_damaged_write_ahead_log_yields_only_written_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_ahead_log, "HALF_BYTES", 96)
    log, written = WriteAheadLog(tmp_path, "a"), set[LoggedTokens]()
    number = log.log_call("me", "one")
    for token in range(3):
        log.log_step([number, token, token])
        written.add(LoggedTokens("me", "one", 0, token, (token,), None))

    def read_tokens(content: bytes) -> set[LoggedTokens]:
        (tmp_path / "tail-b").write_bytes(content)
        return {each._replace(token_ids=tuple(each.token_ids)) for each in read_logged_tokens(tmp_path / "tail-b")}

    whole = (tmp_path / "tail-a").read_bytes()
    assert read_tokens(whole) == written
    for at in range(len(whole)):
        for bits in (1, 128, whole[at]):
            assert read_tokens(whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :]) <= written


def test_torn_write_ahead_log_yields_only_known_call_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_ahead_log, "HALF_BYTES", 512)
    log, rng, path = WriteAheadLog(tmp_path, "a"), random.Random(1), tmp_path / "tail-a"
    number = log.log_call("me", "one")
    for token in range(60):
        log.log_step([number, token, token])
        if token == 30:
            assert log.switch_half_if_filling([(number, "me", "one", 1)])
    content = path.read_bytes()
    assert len(list(read_logged_tokens(path))) > 35
    for _ in range(200):
        torn = bytearray(content)
        at = rng.randrange(36, len(torn))  # after the boot id
        torn[at : at + 8] = rng.randbytes(8)
        path.write_bytes(torn[: len(content)])
        assert {each.id for each in read_logged_tokens(path)} <= {"one"}


def test_merge_tokens_ignores_tokens_after_gap() -> None:
    progress = CallProgress([[1]], [0], [None])
    progress.merge_tokens(0, 2, [3], STOP)
    assert progress.ids == [[1]]
    progress.merge_tokens(0, 0, [1, 2], None)
    progress.merge_tokens(0, 1, [2, 3], STOP)
    assert (progress.ids, progress.ends) == ([[1, 2, 3]], [STOP])
