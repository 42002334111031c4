"""A folder for Unix sockets, removed soon after its owner ends. The owner locks a file in it. The next process that
creates such a folder removes folders whose file is not locked. Process ids would not do, because containers that share
/tmp may have separate ids.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from quire.engine.common.errors import EngineError

_PREFIX = "quire-"
_LOCK = "quire-owner.lock"
_SOCKETS = ("engine.sock", "http.sock", "hub.sock")
"""Only these files and the lock file are removed, because a user's own folder may have a similar name."""
_MOST_BYTES = 107
"""Maximum length of a Unix socket's path in bytes on Linux. Other systems allow only 103."""


class SocketFolder:
    """A folder that only this user can enter. The constructor raises EngineError if none can be created."""

    def __init__(self) -> None:
        try:
            root = Path(tempfile.gettempdir())
            _remove_abandoned(root)
            # The folder is hidden until it is locked, so that nobody removes it as abandoned.
            new_folder = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root))
            self._lock = os.open(new_folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:  # this file system has no locks; nobody removes a folder without the file
                (new_folder / _LOCK).unlink()
            self._path = new_folder.rename(root / new_folder.name.removeprefix("."))
        except OSError as error:
            raise EngineError(f"TMPDIR: no folder for sockets can be created: {error.strerror}") from None
        longest = max(len(os.fsencode(self._path / name)) for name in _SOCKETS)
        if longest > _MOST_BYTES:
            self.close()
            raise EngineError(
                f"TMPDIR: a socket's path in it has {longest} bytes, and at most {_MOST_BYTES} are allowed"
            )

    @property
    def engine(self) -> Path:
        return self._path / _SOCKETS[0]

    @property
    def http(self) -> Path:
        return self._path / _SOCKETS[1]

    @property
    def hub(self) -> Path:
        return self._path / _SOCKETS[2]

    def close(self) -> None:
        _remove(self._path)
        os.close(self._lock)


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's folder, or another process removes it too
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.geteuid():
                    _remove(folder)
            finally:
                os.close(lock)


def _remove(folder: Path) -> None:
    with suppress(OSError):
        for name in (*_SOCKETS, _LOCK):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
