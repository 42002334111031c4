"""The file of --uds."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path

import pytest

from quire.engine.common.errors import ConfigError
from quire.server.cli.serve import main
from quire.server.config import ServerConfig
from quire.server.http.listener import open_listener, warn_if_unprotected


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # a socket's path has at most 107 characters
    return Path("quire.sock")


def test_unix_socket_is_open_to_every_user_and_removed_at_end(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(uds=path)
    with open_listener(config) as listener:
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        warn_if_unprotected(config, listener)
    assert not path.exists()
    assert not caplog.records, "other machines cannot reach it"


def test_file_of_ended_server_is_replaced_and_keeps_permissions(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    path.chmod(0o600)
    with open_listener(ServerConfig(uds=path)) as listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        listener.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_socket_of_running_server_and_other_files_are_refused(path: Path) -> None:
    config = ServerConfig(uds=path)
    with open_listener(config) as listener:
        listener.listen()
        with pytest.raises(ConfigError, match=r"another server listens on quire\.sock"), open_listener(config):
            pass
        assert path.exists()
    path.write_text("notes")
    with pytest.raises(ConfigError, match=r"quire\.sock exists and is not a socket"), open_listener(config):
        pass
    assert path.read_text() == "notes"
    for wrong, why in (("no/such/folder/s", "No such file"), ("x" * 200, "too long")):
        config = ServerConfig(uds=wrong, model="configs/demo")
        with pytest.raises(ConfigError, match=why), open_listener(config):
            pass


def test_socket_of_loading_server_is_refused(path: Path) -> None:
    config = ServerConfig(uds=path)
    with open_listener(config) as listener:
        with pytest.raises(ConfigError, match=r"another server listens on quire\.sock, or will"), open_listener(config):
            pass
        listener.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not list(path.parent.iterdir()), "neither the socket nor its lock"


def test_lock_is_one_file_when_ending_server_removes_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening and the locking, the server that held the lock removes its file."""
    lock, removed = Path(f"{path}.lock"), list[Path]()
    flock = fcntl.flock

    def end_other_server_first(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(lock)
            lock.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", end_other_server_first)
    config = ServerConfig(uds=path)
    with (
        open_listener(config),
        pytest.raises(ConfigError, match=r"another server listens on quire\.sock, or will"),
        open_listener(config),
    ):
        pass
    assert removed
    assert not list(path.parent.iterdir())


def test_lock_follows_no_link_of_another_user(path: Path) -> None:
    path.with_name("quire.sock.lock").symlink_to("chosen")
    with pytest.raises(ConfigError, match=r"quire\.sock\.lock: "), open_listener(ServerConfig(uds=path)):
        pass
    assert not Path("chosen").exists()


def test_file_of_another_program_at_lock_path_is_kept(path: Path) -> None:
    """`--uds poetry` would otherwise delete poetry.lock."""
    notes = path.with_name("quire.sock.lock")
    notes.write_text("notes")
    with pytest.raises(ConfigError, match="belongs to another program"), open_listener(ServerConfig(uds=path)):
        pass
    assert notes.read_text() == "notes"


def test_server_with_full_backlog_is_another_server(path: Path) -> None:
    with open_listener(ServerConfig(uds=path)) as listener:
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(str(path))
            with pytest.raises(ConfigError, match="another server listens"), open_listener(ServerConfig(uds=path)):
                pass


def test_socket_of_later_server_is_not_removed(path: Path) -> None:
    with open_listener(ServerConfig(uds=path)):
        os.unlink(path)
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
    assert path.exists()


def test_uds_flag_excludes_host_and_port_flags(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--host", "127.0.0.1"), ("--port", "1")):
        with pytest.raises(SystemExit):
            main(["--uds", str(path), flag, value], 0.0)
        assert f"--uds and {flag} cannot be combined" in capsys.readouterr().err
    assert not path.exists()
