from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from quire.engine.checkpoint.model_resolver import needs_download, read_raw_config
from quire.engine.common.errors import ConfigError, ModelError
from quire.server.access.host_addresses import is_loopback_listener
from quire.server.config import ServerConfig

log = logging.getLogger("quire.server.cli.serve")
UNIX_SOCKET_MODE = 0o666
_MAX_LOCK_TRIES = 100
"""A try fails if an ending server removes the lock file before it is locked, or if the file system has no stable
inodes.
"""
UNPROTECTED_WARNING = (
    "anyone who can reach %s may use this server, read and delete its stored data, and watch it: no API key is needed "
    "(--api-key, --api-key-file)"
)


@contextmanager
def open_listener(config: ServerConfig) -> Iterator[socket.socket]:
    """Raises ConfigError."""
    with nullcontext() if config.uds is None else _locked(config.uds), bind_or_explain(config) as listener:
        bound_file = None if config.uds is None else _file_identity(config.uds)
        try:
            yield listener
        finally:
            if config.uds is not None and bound_file is not None and _file_identity(config.uds) == bound_file:
                config.uds.unlink()


def bind_or_explain(config: ServerConfig) -> socket.socket:
    """Raises ConfigError."""
    try:
        if config.uds is None:
            return bind_tcp_socket(config.host, config.port)
        return bind_unix_socket(config.uds)
    except ConfigError as error:
        try:
            if not needs_download(config.model, config.revision):
                read_raw_config(config.model, config.revision)
        except ModelError as wrong:
            raise ConfigError(f"{error}; {wrong}") from None
        raise


def bind_tcp_socket(host: str, port: int) -> socket.socket:
    """Does not listen yet: connections are refused until the model is loaded. Raises ConfigError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no valid name"
        shown = host if host.isprintable() else repr(host)
        advice = "choose another --port or --host (make: PORT, HOST)"
        raise ConfigError(f"cannot listen on {shown}:{port}: {why}; {advice}") from None
    return listener


def bind_unix_socket(path: Path) -> socket.socket:
    """Like uvicorn, lets every local user connect to a new file. Raises ConfigError."""
    try:
        mode = _remove_stale_socket(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(mode)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"uds: cannot listen on {path}: {error.strerror or error}", param="uds") from None
    return listener


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Locks the file `path`.lock, because a server that still loads its model does not listen yet."""
    lock_path = path.with_name(f"{path.name}.lock")
    try:
        for _ in range(_MAX_LOCK_TRIES):
            if (lock := _lock_file_or_none(lock_path)) is not None:
                break
        else:
            raise BlockingIOError
    except BlockingIOError:
        raise ConfigError(f"uds: another server listens on {path}, or will once it has loaded", param="uds") from None
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"uds: cannot listen on {path}: {lock_path}: {why}", param="uds") from None
    try:
        yield
    finally:
        lock_path.unlink(missing_ok=True)
        os.close(lock)


def _lock_file_or_none(path: Path) -> int | None:
    """Returns the locked file's descriptor; None if this file is no longer at `path`, where another server could create
    and lock a new one.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(lock)
        if not stat.S_ISREG(status.st_mode) or status.st_size:
            raise FileExistsError(errno.EEXIST, "belongs to another program: a lock is an empty file")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _file_identity(path) == (status.st_dev, status.st_ino):
            return lock
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _remove_stale_socket(path: Path) -> int:
    """Returns permissions for the new file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return UNIX_SOCKET_MODE
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"uds: {path} exists and is not a socket", param="uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(ConnectionRefusedError):
        probe.setblocking(False)
        with suppress(BlockingIOError):  # that server's backlog is full
            probe.connect(str(path))
        raise ConfigError(f"uds: another server listens on {path}", param="uds")
    path.unlink()
    return stat.S_IMODE(mode)


def _file_identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def warn_if_unprotected(config: ServerConfig, listener: socket.socket) -> None:
    if not (config.has_api_keys or listener.family == socket.AF_UNIX or is_loopback_listener(listener)):
        log.warning(UNPROTECTED_WARNING, config.host)
