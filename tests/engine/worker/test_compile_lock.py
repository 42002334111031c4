"""Replicas that start together compile each kernel once: real processes that share a cache folder."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.engine.worker.kernel_compilation.kernel_cache import COMPILE_LOCK, compile_lock, prepare_kernel_cache
from tests.tree import ROOT

COMPILER = """
import os, pathlib, sys, time
from quire.engine.worker.kernel_compilation.kernel_cache import compile_lock
folder = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
waits = []
print("started", flush=True)
sys.stdin.readline()
with compile_lock(lambda: waits.append(None)):
    kernel = folder / "kernel"
    if not kernel.exists():
        time.sleep(0.3)
        kernel.touch()
        with open(folder / "compiled", "a") as file:
            file.write("once ")
"""


def test_concurrent_starts_compile_once(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [
        subprocess.Popen([sys.executable, "-c", COMPILER], env=environment, text=True, **pipes) for _ in range(3)
    ]
    for each in processes:
        assert each.stdout is not None
        assert each.stdout.readline() == "started\n"
    for each in processes:
        each.communicate("go\n")
        assert each.returncode == 0
    assert (tmp_path / "compiled").read_text() == "once "


def test_wait_for_compile_lock_reports_progress_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    other = os.open(tmp_path / COMPILE_LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(other, fcntl.LOCK_EX)
    waits: list[int] = []

    def progress() -> None:
        waits.append(len(waits))
        if len(waits) == 3:
            os.close(other)

    with compile_lock(progress):
        assert waits == [0, 1, 2]
        another = os.open(tmp_path / COMPILE_LOCK, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with compile_lock(lambda: None, seconds=0.0):
            pass  # one that hangs stops nobody for good
    fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(another)


def test_folder_without_lock_support_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "missing"))
    with compile_lock(lambda: pytest.fail("waits")):
        pass
    with pytest.raises(ZeroDivisionError), compile_lock(lambda: None):
        raise ZeroDivisionError


def test_shipped_kernels_are_copied_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts at the same time reads what is there under its final name."""
    from quire.engine.worker.kernel_compilation import kernel_cache

    (tmp_path / "shipped/a").mkdir(parents=True)
    (tmp_path / "shipped/a/kernel.cubin").write_bytes(b"x" * 1000)
    monkeypatch.setattr(kernel_cache, "SHIPPED_KERNELS", tmp_path / "shipped")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert prepare_kernel_cache() is None
    assert [each.name for each in (tmp_path / "cache/a").iterdir()] == ["kernel.cubin"]
    assert (tmp_path / "cache/a/kernel.cubin").read_bytes() == b"x" * 1000
