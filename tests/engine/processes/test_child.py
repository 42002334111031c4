"""Tests that a child process gets its configuration and ends when it is told to, whatever it does."""

from __future__ import annotations

import signal
from subprocess import PIPE

import pytest

from quire.engine.processes.child import Child


async def test_child_reads_configuration_and_exits_when_stdin_closes() -> None:
    script = "import sys; print(sys.stdin.readline(), end='', flush=True); sys.stdin.read()"
    child = Child(["-c", script], b"all of it", stdout=PIPE)
    with child.process.stdout as stdout:  # type: ignore[union-attr]
        assert stdout.readline() == b"all of it\n"
        assert child.returncode is None
        await child.stop(60)
    assert child.returncode == 0


async def test_child_that_does_not_exit_is_killed() -> None:
    child = Child(["-c", "import time; time.sleep(600)"])
    await child.stop(0.05)
    assert child.returncode == -signal.SIGKILL


async def test_child_may_exit_before_reading_configuration() -> None:
    child = Child(["-c", "import os; os._exit(3)"], b"x" * 4096)
    assert await child.wait_for_exit() == 3


def test_child_with_too_large_environment_raises_os_error() -> None:
    with pytest.raises(OSError):
        Child(["-c", ""], environment={"LARGE": "x" * 2**22})
