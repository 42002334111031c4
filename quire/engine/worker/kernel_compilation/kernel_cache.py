from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quire.engine.common.errors import ConfigError

_CACHE_VARIABLE = "TRITON_CACHE_DIR"
SHIPPED_KERNELS = Path(sys.prefix, "share", "quire-kernels")
"""This folder exists only in the container image, whose build compiles the kernels with fill.py."""


COMPILE_LOCK = "quire-compile.lock"
_LOCK_SECONDS = 600.0
"""After this wait for another process, this process compiles the kernels, too."""
_POLL_SECONDS = 0.1
_OTHER_CACHE_VARIABLES = ("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "QUACK_CACHE_DIR", "CUTE_DSL_CACHE_DIR")
"""flash-attn 4 and its libraries raise an error if they cannot write to these folders. If the variables are unset, they
use the temporary folder.
"""


def prepare_kernel_cache(temporary: Path | None = None, uid: int | None = None) -> str | None:
    """Call before Triton compiles. Raises ConfigError."""
    for name in _OTHER_CACHE_VARIABLES:
        if (folder := os.environ.get(name)) and _find_write_error(Path(folder)) is not None:
            del os.environ[name]
    folder_wanted = _cache_folder()
    if (reason := _find_write_error(folder_wanted)) is None:
        _copy_shipped_kernels(folder_wanted)
        return None
    uid = os.getuid() if uid is None else uid
    fallback = (temporary or Path(tempfile.gettempdir())) / f"quire-triton-{uid}"
    if (failed := _find_write_error(fallback)) is not None or fallback.stat().st_uid != uid:
        whose = failed or "it belongs to another user"
        raise ConfigError(
            f"Triton's kernels cannot be kept: {folder_wanted} ({reason}), "
            f"nor {fallback} ({whose}); set {_CACHE_VARIABLE}"
        )
    os.environ[_CACHE_VARIABLE] = str(fallback)
    _copy_shipped_kernels(fallback)
    return f"Triton's kernels are kept in {fallback}: uid {uid} cannot write to {folder_wanted} ({reason})"


@contextmanager
def compile_lock(progress: Callable[[], None], seconds: float = _LOCK_SECONDS) -> Iterator[None]:
    """Hold a lock while kernels are compiled, so that replicas which start together compile each kernel only once."""
    lock: int | None = None
    with suppress(OSError):
        lock = os.open(_cache_folder() / COMPILE_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + seconds
        while lock is not None and time.monotonic() < deadline and _is_locked_by_another(lock):
            progress()
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        if lock is not None:
            os.close(lock)


def trial_verdict_folder() -> Path:
    """Returns a subfolder of the kernels' folder, so that both are deleted together."""
    return _cache_folder() / "quire-trials"


def _is_locked_by_another(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _cache_folder() -> Path:
    return Path(os.environ.get(_CACHE_VARIABLE) or os.path.expanduser("~/.triton/cache"))


def _copy_shipped_kernels(folder: Path) -> None:
    """Copies the image's kernels to `folder`, because Triton reads only one folder."""

    def copy_new(source: str, target: str) -> None:
        if not os.path.exists(target):
            part = f"{target}.{os.getpid()}"  # another starting process must not read half a file
            shutil.copyfile(source, part)
            os.replace(part, target)

    with suppress(OSError, shutil.Error):  # on failure, all kernels are compiled
        if SHIPPED_KERNELS.is_dir():
            shutil.copytree(SHIPPED_KERNELS, folder, copy_function=copy_new, dirs_exist_ok=True)


def _find_write_error(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return (error.strerror or str(error)).lower()
