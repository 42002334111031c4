"""Commands in unusual environments: closed streams, full disks, few open files, repeated signals, killed owners."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.common.errors import EngineError
from quire.engine.processes.socket_folder import SocketFolder
from tests.broken_folders import copy_demo
from tests.e2e.server import free_port
from tests.server.cli.processes import needs_proc

pytestmark = pytest.mark.slow

SMALL = ["--num-kv-blocks", "256", "--max-model-len", "2048", "--max-num-seqs", "8", "--threads", "1"]
full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "quire", *argv]


@contextmanager
def start_server(
    *flags: str, prepare: Callable[[], None] | None = None, **variables: str
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server, perhaps not ready yet, and its URL; its standard error is a pipe."""
    port = free_port()
    argv = command("serve", "--port", str(port), *SMALL, *flags)
    null = subprocess.DEVNULL

    def dispose() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, if it runs the tests, ignores this signal
        if prepare is not None:
            prepare()

    process = subprocess.Popen(
        argv, stdout=null, stderr=subprocess.PIPE, preexec_fn=dispose, env=os.environ | variables
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def wait_until_ready(process: subprocess.Popen[bytes], base: str) -> None:
    """pytest's timeout bounds the wait."""
    while True:
        assert process.poll() is None
        try:
            if httpx.get(f"{base}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)


def completion(base: str) -> str:
    answer = httpx.post(f"{base}/v1/completions", json={"prompt": "Once", "max_tokens": 5}, timeout=60)
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("closed", [(0, 1, 2), (0,), (1,), (2,)], ids=str)
def test_server_runs_with_closed_standard_streams(closed: tuple[int, ...]) -> None:
    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    with start_server(prepare=close) as (process, base):
        wait_until_ready(process, base)
        assert completion(base)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def _catches_signal(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"SigCgt:\s*(\w+)", status)
    assert caught
    return bool(int(caught.group(1), 16) >> (number - 1) & 1)


def send_sighup_until_exit(process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.005)
    assert process.returncode == 0
    assert process.stderr is not None
    assert b"Traceback" not in process.stderr.read()


@needs_proc
@pytest.mark.parametrize("tenths", range(20))
def test_repeated_sighup_during_start_exits_cleanly(tenths: int) -> None:
    with start_server() as (process, _):
        while not _catches_signal(process.pid, signal.SIGHUP):  # before this, the interpreter has run none of our code
            assert process.poll() is None
        time.sleep(tenths / 10)
        send_sighup_until_exit(process)


@pytest.mark.parametrize("turn", range(10))
def test_repeated_sighup_drains_open_stream_and_exits_cleanly(turn: int) -> None:
    """The first SIGHUP lets open requests end; later ones change nothing."""
    body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with start_server() as (process, base):
        wait_until_ready(process, base)
        with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            for _ in range(20):
                process.send_signal(signal.SIGHUP)
                time.sleep(0.005)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        send_sighup_until_exit(process)


def test_sigterm_during_start_exits_cleanly() -> None:
    with start_server() as (process, _):
        while not _catches_signal(process.pid, signal.SIGTERM):
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_second_sigterm_during_start_exits_without_output() -> None:
    with start_server() as (process, _):
        wait_for = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while wait_for.exists() and not wait_for.read_text():  # until it starts an engine
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, 130)
        assert process.stderr is not None
        assert process.stderr.read() == b""


def write_batch_input(path: Path, count: int) -> Path:
    body = {"prompt": "Once", "max_tokens": 5}
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@full_device
def test_full_disk_ends_run_with_one_line(tmp_path: Path) -> None:
    argv = command("run", str(write_batch_input(tmp_path / "in.jsonl", 20)), "-o", "/dev/full", *SMALL)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    *_, tally, error = done.stderr.splitlines()
    assert tally.startswith("0 done, 0 failed, 20 left")
    assert error == "quire run: cannot write /dev/full: No space left on device"
    assert "Traceback" not in done.stderr


def test_run_resumes_output_truncated_by_full_disk(tmp_path: Path) -> None:
    """A file size limit stands in for a full disk: it cuts the last line."""
    output = tmp_path / "out.jsonl"

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing fails with EFBIG instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    argv = command("run", str(write_batch_input(tmp_path / "in.jsonl", 12)), "-o", str(output), *SMALL)
    cut = subprocess.run(argv, capture_output=True, text=True, timeout=120, preexec_fn=limit)
    assert cut.returncode == 1
    assert cut.stderr.splitlines()[-1] == f"quire run: cannot write {output}: File too large"
    whole = output.read_bytes().count(b"\n")
    assert 0 < whole < 12
    assert output.stat().st_size == 2000
    done = subprocess.run([*argv, "--resume"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{whole} already done, {12 - whole} to do" in done.stderr
    assert sorted(json.loads(line)["custom_id"] for line in output.open()) == sorted(map(str, range(12)))


@full_device
def test_full_stdout_prints_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        argv = command("plan", "--gpu", "all")
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "quire plan: No space left on device\n"


def run_to_end(*argv: str, **options: Any) -> tuple[int, str]:
    """Status and standard error of a command that ends by itself."""
    done = subprocess.run(command(*argv), capture_output=True, timeout=120, stdin=subprocess.DEVNULL, **options)
    assert done.stdout == b""
    return done.returncode, done.stderr.decode()


NAMES = {"nonsense.invalid": "", "a" * 300: "no valid name", "ü" * 70 + ".x": "no valid name", "a\nb": "'a\\nb'"}
"""Hosts that the server cannot listen on, and part of the error. The first host's error depends on the resolver."""


@pytest.mark.parametrize("host", NAMES, ids=range(len(NAMES)))
def test_invalid_host_prints_one_line(host: str) -> None:
    status, error = run_to_end("serve", "--host", host, "--port", "0")
    assert status == 1
    assert error.startswith("quire serve: cannot listen on ")
    assert NAMES[host] in error
    assert error.count("\n") == 1


def test_model_path_that_is_not_utf_8_prints_one_line(tmp_path: Path) -> None:
    status, error = run_to_end(
        "serve", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"), env=os.environ | {"LC_ALL": "C.UTF-8"}
    )
    assert status == 2
    assert error.startswith("quire serve: model: is not UTF-8 text, got ")
    assert error.count("\n") == 1


def test_deeply_nested_config_file_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text("x = " + "[" * 100_000)
    status, error = run_to_end("serve", "--config", str(tmp_path / "deep.toml"))
    assert (status, error.count("\n")) == (2, 1)
    assert "is not TOML" in error


def test_server_runs_in_deleted_directory_without_home(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()

    def leave() -> None:
        os.chdir(gone)
        gone.rmdir()

    with start_server(prepare=leave, PYTHONPATH=str(Path(__file__).parents[3]), HOME="/nowhere") as (process, base):
        wait_until_ready(process, base)
        assert completion(base)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.parametrize("name", ["new\nline", "mödel 日本", "'\"; -x"], ids=range(3))
def test_model_folder_with_special_characters_is_served(name: str, tmp_path: Path) -> None:
    folder = copy_demo(tmp_path / name)
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    with start_server(str(folder), **ascii_only) as (process, base):
        wait_until_ready(process, base)
        assert httpx.get(f"{base}/v1/models").json()["data"][0]["id"] == name
        assert completion(base)


def open_file_limiter(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@needs_proc
def test_open_file_limit_is_raised_to_hard_limit() -> None:
    with start_server(prepare=open_file_limiter(64, 2048)) as (process, base):
        wait_until_ready(process, base)
        assert re.search(r"Max open files +2048 +2048", Path(f"/proc/{process.pid}/limits").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert b"ulimit" not in process.stderr.read()


def test_low_open_file_limit_is_logged_and_server_survives_excess() -> None:
    with start_server(prepare=open_file_limiter(70, 70)) as (process, base):
        wait_until_ready(process, base)
        clients = [httpx.Client(base_url=base, timeout=5) for _ in range(60)]
        served = 0
        for client in clients:
            try:
                served += client.get("/live").status_code == 200
            except httpx.TransportError:
                continue
        assert served >= 20
        for client in clients:
            client.close()
        wait_until_ready(process, base)
        assert completion(base)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        log = process.stderr.read().decode()
        assert process.wait(60) == 0
    assert "ulimit -n: 70 open files leave room for about 30 connections at once" in log
    assert "Traceback" not in log


def test_serve_rejects_too_low_open_file_limit() -> None:
    with start_server(prepare=open_file_limiter(24, 24)) as (process, _):
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b"quire serve: ulimit -n: 24 open files are too few, at least 64 are needed\n"


@needs_proc
def test_next_start_removes_socket_folder_of_killed_server(tmp_path: Path) -> None:
    """The folder of a live server stays."""
    mine = tmp_path / "quire-notes"
    mine.mkdir()
    (mine / "lock").write_text("a folder of the user's own")
    variables = {"TMPDIR": str(tmp_path)}
    with start_server(**variables) as (living, base), start_server(**variables) as (killed, _):
        wait_until_ready(living, base)
        while len(list(tmp_path.glob("quire-*/engine.sock"))) < 2:
            time.sleep(0.05)
        killed.kill()
        killed.wait()
        assert len(list(tmp_path.glob("quire-*/engine.sock"))) == 2
        with start_server(**variables) as (third, other):
            wait_until_ready(third, other)
            assert len(list(tmp_path.glob("quire-*/engine.sock"))) == 2
            assert completion(base)
            assert completion(other)
            third.send_signal(signal.SIGTERM)
            assert third.wait(60) == 0
        living.send_signal(signal.SIGTERM)
        assert living.wait(60) == 0
    assert list(tmp_path.iterdir()) == [mine]


def test_socket_folder_cleanup_removes_only_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned = tmp_path / "quire-abandoned"
    abandoned.mkdir()
    for name in ("quire-owner.lock", "engine.sock", "thesis.txt"):
        (abandoned / name).write_text("")
    (tmp_path / "quire-link").symlink_to(abandoned)
    with closing(SocketFolder()) as first, closing(SocketFolder()) as second:
        assert first.engine.parent.is_dir()
        assert first.engine != second.engine
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quire-abandoned", "quire-link"]
    assert [path.name for path in abandoned.iterdir()] == ["thesis.txt"]


def test_unusable_temporary_folder_raises_engine_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(EngineError, match="TMPDIR: a socket's path in it has"):
        SocketFolder()
    assert not list(deep.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(EngineError, match="TMPDIR: no folder for sockets can be created: No such file"):
        SocketFolder()
