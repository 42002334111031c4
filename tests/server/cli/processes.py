"""Parents, children and states of processes, from /proc."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")


def _stat(pid: int) -> tuple[str, int] | None:
    """State and parent of a process; None if it has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return state, int(parent)


def children(pid: int) -> list[int]:
    stats = {int(path.name): _stat(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit()}
    return [child for child, stat in stats.items() if stat is not None and stat[1] == pid and stat[0] != "Z"]


def parent(pid: int) -> int | None:
    """None if the process has ended."""
    stat = _stat(pid)
    return None if stat is None else stat[1]


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def engines(pid: int) -> list[int]:
    """The children of a server that are engine processes; a server that is starting has workers too."""
    return [child for child in children(pid) if b"quire.engine.main" in _command(child)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_until_gone(pid: int) -> None:
    """pytest's timeout bounds the wait."""
    while (stat := _stat(pid)) is not None and stat[0] != "Z":
        time.sleep(0.05)
