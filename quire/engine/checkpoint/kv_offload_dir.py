"""Private folder of KV blocks on disk (engine/tiers/disk_tier.py)."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from pathlib import Path

from quire.engine.common import random_source
from quire.engine.common.errors import ConfigError

KV_DIR_NAME = "quire-kv"
DELETED_PREFIX = ".gone-"
PARTIAL_PREFIX = ".new-"


def open_kv_dir(folder: str) -> Path:
    """Creates the folder if needed. Raises ConfigError unless it is private and writable."""
    root = Path(folder).absolute() / KV_DIR_NAME
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        make_private_dir(root)
        dir_stat = root.lstat()
        if not stat.S_ISDIR(dir_stat.st_mode) or dir_stat.st_uid != os.getuid() or dir_stat.st_mode & 0o077:
            reason = (
                f"{str(root)!r} must be a folder that belongs to this user and that nobody else can read (mode 0700)"
            )
            raise ConfigError(f"kv_offload_dir: {reason}", param="kv_offload_dir")
        (probe := root / f"{PARTIAL_PREFIX}{os.getpid()}").touch(0o600)
        probe.unlink()
    except OSError as error:
        reason = f"cannot keep KV blocks in {folder!r}: {error.strerror or error}"
        raise ConfigError(f"kv_offload_dir: {reason}", param="kv_offload_dir") from None
    return root


def delete_kv_blocks(folder: str | Path) -> None:
    """Makes all engines forget the blocks at once. A thread removes the files."""
    root = Path(folder).absolute() / KV_DIR_NAME
    trash_dir = root.with_name(f"{DELETED_PREFIX}{KV_DIR_NAME}-{os.getpid()}-{random_source.token_hex(4)}")
    try:
        root.rename(trash_dir)
    except FileNotFoundError:
        return
    threading.Thread(target=shutil.rmtree, args=(trash_dir, True), name="kv-forget", daemon=True).start()


def make_private_dir(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
