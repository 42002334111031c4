"""Tests the disk tier and the seal of its blocks: what is read is what was written, or nothing."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quire.engine.checkpoint.kv_offload_dir import delete_kv_blocks
from quire.engine.common.errors import ConfigError
from quire.engine.tiers.disk_tier import DiskTier
from quire.engine.tiers.guarded_tier import GuardedTier
from quire.engine.tiers.sealed_blocks import HEADER_BYTES, seal_block, unseal_block
from quire.engine.tiers.tier import BlockContent

OWN, OTHER = b"o" * 16, b"x" * 16
GIB = 2**30


def digest(index: int) -> bytes:
    return index.to_bytes(16, "big")


def page(index: int, size: int = 500) -> bytes:
    return random.Random(index).randbytes(size)


def disk(folder: Path, most: int = GIB, identity: bytes = OWN) -> DiskTier:
    return DiskTier(str(folder), most, identity)


def sealed(folder: Path, most: int = GIB, identity: bytes = OWN) -> GuardedTier:
    return GuardedTier(disk(folder, most, identity), identity)


def files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.is_file())


def test_blocks_survive_restart_in_owner_only_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        first = sealed(tmp_path / "new" / "folder")
        first.put(digest(1), page(1))
    finally:
        os.umask(before)
    again = sealed(tmp_path / "new" / "folder")
    assert again.lookup(digest(1))
    assert bytes(again.fetch(digest(1)) or b"") == page(1)
    assert not again.lookup(digest(2))
    assert again.fetch(digest(2)) is None
    root = tmp_path / "new" / "folder" / "quire-kv"
    for each in [root, *root.rglob("*")]:
        assert stat.S_IMODE(each.stat().st_mode) == (0o700 if each.is_dir() else 0o600)


def test_least_recently_used_block_is_evicted_after_restart(tmp_path: Path) -> None:
    each = 500 + HEADER_BYTES
    tier = sealed(tmp_path, 3 * each)
    for index in range(3):
        tier.put(digest(index), page(index))
        os.utime(tmp_path / "quire-kv" / OWN.hex() / digest(index).hex(), (index, index))
    assert tier.fetch(digest(0)) is not None
    again = sealed(tmp_path, 3 * each)
    again.put(digest(3), page(3))
    assert [again.lookup(digest(index)) for index in range(4)] == [True, False, True, True]
    assert len(files(tmp_path)) == 3
    smaller = sealed(tmp_path, each)
    assert len(files(tmp_path)) == 1
    assert smaller.lookup(digest(3))


def test_other_identities_are_unreadable_and_share_byte_limit(tmp_path: Path) -> None:
    each = 500 + HEADER_BYTES
    sealed(tmp_path, 2 * each, OTHER).put(digest(1), page(1))
    own = sealed(tmp_path, 2 * each)
    assert not own.lookup(digest(1))
    (path,) = files(tmp_path)
    moved = path.parent.with_name(OWN.hex()) / path.name
    path.rename(moved)  # as if somebody moved it into this identity's folder
    assert sealed(tmp_path, 2 * each).fetch(digest(1)) is None
    assert not moved.exists()
    other = sealed(tmp_path, 2 * each, OTHER)
    for index in (2, 3):
        other.put(digest(index), page(index))
    own = sealed(tmp_path, 2 * each)
    own.put(digest(4), page(4))
    assert [other.fetch(digest(2)), own.fetch(digest(4))] == [None, page(4)]


def test_block_under_wrong_name_is_miss(tmp_path: Path) -> None:
    tier = sealed(tmp_path)
    for index in (1, 2):
        tier.put(digest(index), page(index))
    one, two = files(tmp_path)
    one.write_bytes(two.read_bytes())
    assert tier.fetch(digest(1)) is None
    assert bytes(tier.fetch(digest(2)) or b"") == page(2)


def test_unseal_rejects_truncation_and_bit_flips() -> None:
    whole = seal_block(OWN, digest(1), page(1))
    assert unseal_block(OWN, digest(1), whole) == page(1)
    assert unseal_block(OWN, digest(2), whole) is None
    assert unseal_block(OTHER, digest(1), whole) is None
    for length in range(len(whole)):
        assert unseal_block(OWN, digest(1), whole[:length]) is None
    assert unseal_block(OWN, digest(1), whole + b"\0") is None
    for bit in range(len(whole) * 8):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        assert unseal_block(OWN, digest(1), bytes(changed)) is None


def test_drop_all_and_delete_kv_blocks_leave_no_files(tmp_path: Path) -> None:
    tier = sealed(tmp_path)
    tier.put(digest(1), page(1))
    tier.drop(None)
    assert not tier.lookup(digest(1))
    assert tier.fetch(digest(1)) is None
    assert files(tmp_path / "quire-kv") == []
    tier.put(digest(2), page(2))
    assert tier.lookup(digest(2))
    delete_kv_blocks(tmp_path)
    assert tier.fetch(digest(2)) is None
    assert not tier.lookup(digest(2))
    delete_kv_blocks(tmp_path)
    delete_kv_blocks(tmp_path)  # nothing is there
    left = sealed(tmp_path)
    assert files(tmp_path) == []
    assert not left.lookup(digest(2))


@pytest.mark.parametrize("what", ["a file", "open to others", "a link", "unwritable"])
def test_disk_tier_rejects_unsafe_folder(what: str, tmp_path: Path) -> None:
    root = tmp_path / "quire-kv"
    if what == "a file":
        root.write_text("")
    elif what == "open to others":
        root.mkdir()
        root.chmod(0o750)
    elif what == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "elsewhere")
    else:
        root = tmp_path / "file"
        root.write_text("")
        tmp_path = root / "below"
    with pytest.raises(ConfigError, match="kv_offload_dir"):
        disk(tmp_path)


def test_symlinks_and_pipes_are_misses(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    tier.put(digest(1), page(1))
    tier.put(digest(2), page(2))
    one, two = files(tmp_path)
    (tmp_path / "secret").write_text("not for you")
    one.unlink()
    one.symlink_to(tmp_path / "secret")
    two.unlink()
    os.mkfifo(two)
    assert tier.fetch(digest(1)) is None
    assert tier.fetch(digest(2)) is None
    assert (tmp_path / "secret").exists()


def test_disk_tier_survives_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", full)
        tier.put(digest(1), page(1))
    assert not tier.lookup(digest(1))
    assert files(tmp_path) == []
    tier.put(digest(1), page(1))
    assert tier.fetch(digest(1)) == page(1)


def test_disk_tier_is_thread_safe(tmp_path: Path) -> None:
    tier = sealed(tmp_path, 20 * (500 + HEADER_BYTES))
    wrong: list[int] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(150):
            index = chance.randrange(40)
            if chance.random() < 0.5:
                tier.put(digest(index), page(index))
            elif (block := tier.fetch(digest(index))) is not None and bytes(block) != page(index):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert len(files(tmp_path)) <= 20


WRITE = """
import sys
from tests.engine.tiers.test_disk_tier import sealed, digest, page
from pathlib import Path
tier = sealed(Path(sys.argv[1]))
for index in range(int(sys.argv[2]), 10**9):
    tier.put(digest(index), page(index, 200_000))
    print(index, flush=True)
"""


def test_kill_during_write_leaves_no_wrong_block(tmp_path: Path) -> None:
    begin = 0
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITE, str(tmp_path), str(begin)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            for _ in range(5):
                begin = int(writer.stdout.readline()) + 1
            writer.kill()
        tier = sealed(tmp_path)
        for index in range(begin):
            assert bytes(tier.fetch(digest(index)) or b"") == page(index, 200_000)
        for index in range(begin, begin + 50):
            block = tier.fetch(digest(index))
            assert block is None or bytes(block) == page(index, 200_000)
        assert all(not each.name.startswith(".new-") for each in files(tmp_path))


class Failing:
    """A user-defined tier that fails."""

    name = "failing"

    def __init__(self) -> None:
        self.fails = True

    def _maybe(self) -> None:
        if self.fails:
            raise RuntimeError("no connection")

    def lookup(self, digest: bytes) -> bool:
        self._maybe()
        return True

    def fetch(self, digest: bytes) -> BlockContent | None:
        self._maybe()
        return seal_block(OWN, digest, b"page")

    def put(self, digest: bytes, page: BlockContent) -> None:
        self._maybe()

    def drop(self, digest: bytes | None) -> None:
        self._maybe()


def test_failing_tier_misses_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tier = GuardedTier(failing := Failing(), OWN)
    for _ in range(3):
        assert (tier.lookup(digest(1)), tier.fetch(digest(1))) == (False, None)
        tier.put(digest(1), b"")
        tier.drop(None)
    assert len(caplog.records) == 1
    failing.fails = False
    assert tier.lookup(digest(1))
    assert tier.fetch(digest(1)) == b"page"
