"""The disk tier: one file per block, of which the least recently used is evicted first (by modification time). It
survives the engine.

Each identity (kv_identity.py) has its own subfolder. All subfolders share the limit. Folders have mode 0700, files
0600. Files are renamed when complete and verified when read, because disks and power fail.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections import OrderedDict
from pathlib import Path
from threading import Lock

from quire.engine.checkpoint.kv_offload_dir import (
    DELETED_PREFIX,
    KV_DIR_NAME,
    PARTIAL_PREFIX,
    delete_kv_blocks,
    make_private_dir,
    open_kv_dir,
)
from quire.engine.common import random_source
from quire.engine.tiers.tier import BlockContent

log = logging.getLogger("quire.tiers")


class DiskTier:
    """Several servers may share a folder. Each counts only the files that it has listed or written."""

    name = "disk"

    def __init__(self, folder: str, max_bytes: int, identity: bytes) -> None:
        """Raises ConfigError if the folder is not private and writable."""
        self._root = open_kv_dir(folder)
        self._identity_folder = identity.hex()
        self._max_bytes = max_bytes
        self._files: OrderedDict[str, int] = OrderedDict()
        """Size in bytes, keyed by path below the root, least recently used first."""
        self._bytes = 0
        self._lock = Lock()
        self._write_failed = False
        make_private_dir(self._root / self._identity_folder)
        for path, size in _scan_and_clean_folder(self._root):
            self._files[path] = size
            self._bytes += size
        self._evict()

    @property
    def num_blocks_and_bytes(self) -> tuple[int, int]:
        return len(self._files), self._bytes

    def lookup(self, digest: bytes) -> bool:
        with self._lock:
            if (name := self._block_path(digest)) not in self._files:
                return False
            self._files.move_to_end(name)
            return True

    def fetch(self, digest: bytes) -> BlockContent | None:
        name = self._block_path(digest)
        try:
            descriptor = os.open(self._root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError("not a file")
                content = file.read()
                os.utime(descriptor)
        except OSError:
            self._remove_file(name)
            return None
        return content

    def put(self, digest: bytes, page: BlockContent) -> None:
        name = self._block_path(digest)
        with self._lock:
            if name in self._files or len(page) > self._max_bytes:
                return
        temporary = self._root / self._identity_folder / f"{PARTIAL_PREFIX}{os.getpid()}-{random_source.token_hex(4)}"
        try:
            make_private_dir(self._root)  # all blocks may have been deleted
            make_private_dir(temporary.parent)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(page)
            os.rename(temporary, self._root / name)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if not self._write_failed:
                log.warning("KV blocks cannot be written to %s: %s", self._root, error.strerror or error)
            self._write_failed = True
            return
        self._write_failed = False
        with self._lock:
            self._files[name] = len(page)
            self._bytes += len(page)
        self._evict()

    def drop(self, digest: bytes | None) -> None:
        if digest is None:
            with self._lock:
                self._files.clear()
                self._bytes = 0
            delete_kv_blocks(self._root.parent)
            make_private_dir(self._root)
            make_private_dir(self._root / self._identity_folder)
        else:
            self._remove_file(self._block_path(digest))

    def _block_path(self, digest: bytes) -> str:
        return f"{self._identity_folder}/{digest.hex()}"

    def _remove_file(self, name: str) -> None:
        with self._lock:
            self._bytes -= self._files.pop(name, 0)
        (self._root / name).unlink(missing_ok=True)

    def _evict(self) -> None:
        """Deletes without holding the lock, so that lookups do not wait for the disk."""
        evicted = []
        with self._lock:
            while self._bytes > self._max_bytes:
                name, size = self._files.popitem(last=False)
                self._bytes -= size
                evicted.append(name)
        for name in evicted:
            (self._root / name).unlink(missing_ok=True)


def _scan_and_clean_folder(root: Path) -> list[tuple[str, int]]:
    """Returns (path, bytes), least recently used first. Removes unfinished files of processes that have ended."""
    for leftover in root.parent.glob(f"{DELETED_PREFIX}{KV_DIR_NAME}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    files = []
    for folder in os.scandir(root):
        if not folder.is_dir(follow_symlinks=False):
            continue
        for file in os.scandir(folder):
            if file.name.startswith(PARTIAL_PREFIX):
                if not _is_process_alive(file.name.removeprefix(PARTIAL_PREFIX).split("-")[0]):
                    Path(file.path).unlink(missing_ok=True)
            elif file.is_file(follow_symlinks=False):
                status = file.stat(follow_symlinks=False)
                files.append((status.st_mtime_ns, f"{folder.name}/{file.name}", status.st_size))
    return [(name, size) for _, name, size in sorted(files)]


def _is_process_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True
