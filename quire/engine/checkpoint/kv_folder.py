"""The folder where KV pages outlive an engine (engine/tiers/disk_tier.py): its owner's alone, and forgotten at once."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from pathlib import Path

from quire.engine import random_source
from quire.engine.errors import ConfigError

ROOT = "quire-kv"
GONE = ".gone-"
"""Of folders on their way out."""
NEW = ".new-"
"""Of files that are not whole yet."""


def open_root(folder: str) -> Path:
    """The folder of ours in the one that was named; both are made if need be."""
    root = Path(folder).absolute() / ROOT
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        make(root)
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            wrong = f"{str(root)!r} is not a folder of this user's that nobody else can read (0700)"
            raise ConfigError(f"kv_offload_dir: {wrong}", param="kv_offload_dir")
        (probe := root / f"{NEW}{os.getpid()}").touch(0o600)
        probe.unlink()
    except OSError as error:
        wrong = f"cannot keep pages in {folder!r}: {error.strerror or error}"
        raise ConfigError(f"kv_offload_dir: {wrong}", param="kv_offload_dir") from None
    return root


def forget_pages(folder: str | Path) -> None:
    """Forget all pages that are kept in this folder, whatever engine put them there: at once, though it takes a thread
    some time to remove so many files. What it leaves unfinished is removed at the next start."""
    root = Path(folder).absolute() / ROOT
    gone = root.with_name(f"{GONE}{ROOT}-{os.getpid()}-{random_source.token_hex(4)}")
    try:
        root.rename(gone)
    except FileNotFoundError:
        return
    threading.Thread(target=shutil.rmtree, args=(gone, True), name="kv-forget", daemon=True).start()


def make(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
