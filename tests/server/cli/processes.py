"""Descendants of processes, and their ends, from /proc."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.server import children

needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")


def parent(pid: int) -> int | None:
    """None if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def engines(pid: int) -> list[int]:
    """The children of a server that are engine processes; a server that is starting has workers too."""
    return children(pid, b"quire.engine.main")


def has_ended(pid: int) -> bool:
    """True if a process has ended, though some of its threads may still be exiting."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until_gone(pid: int) -> None:
    """pytest's timeout bounds the wait."""
    while not has_ended(pid):
        time.sleep(0.05)
