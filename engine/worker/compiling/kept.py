"""Where a GPU's compiled kernels are kept from one start to the next."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from quire.engine.errors import ConfigError

_CACHE = "TRITON_CACHE_DIR"
SHIPPED = Path(sys.prefix, "share", "quire-kernels")
"""What the Dockerfile lets engine/worker/compiling/fill.py compile."""


_OTHER_CACHES = ("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "QUACK_CACHE_DIR", "CUTE_DSL_CACHE_DIR")
"""Those of flash-attn 4 and its libraries, which raise where they cannot write; without them they take the temporary
folder."""


def keep_kernels(temporary: Path | None = None, uid: int | None = None) -> str | None:
    """See to it that Triton can keep what it compiles: where its folder cannot be written, in one of this user's in the
    temporary folder. Returns a note if it came to that. Triton reads the variable when it first compiles. `temporary`,
    `uid`: by default the system's folder, and this process's user."""
    for name in _OTHER_CACHES:
        if (folder := os.environ.get(name)) and _cannot_write(Path(folder)) is not None:
            del os.environ[name]
    wanted = Path(os.environ.get(_CACHE) or os.path.expanduser("~/.triton/cache"))
    if (reason := _cannot_write(wanted)) is None:
        _bring_shipped(wanted)
        return None
    uid = os.getuid() if uid is None else uid
    own = (temporary or Path(tempfile.gettempdir())) / f"quire-triton-{uid}"
    if (failed := _cannot_write(own)) is not None or own.stat().st_uid != uid:
        whose = failed or "it is another user's"
        raise ConfigError(f"Triton's kernels cannot be kept: {wanted} ({reason}), nor {own} ({whose}); set {_CACHE}")
    os.environ[_CACHE] = str(own)
    _bring_shipped(own)
    return f"Triton's kernels are kept in {own}, for uid {uid} cannot write to {wanted} ({reason})"


def _bring_shipped(folder: Path) -> None:
    """Put what the image has of compiled kernels where Triton looks; it cannot look in two places."""

    def copy_new(source: str, target: str) -> None:
        if not os.path.exists(target):
            shutil.copyfile(source, target)

    with suppress(OSError, shutil.Error):  # without them all is compiled
        if SHIPPED.is_dir():
            shutil.copytree(SHIPPED, folder, copy_function=copy_new, dirs_exist_ok=True)


def _cannot_write(folder: Path) -> str | None:
    """Why files cannot be made in the folder; it is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return (error.strerror or str(error)).lower()
