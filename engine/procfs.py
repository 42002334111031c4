"""What Linux tells of a process: whether it is stopped, and how long it could have computed.

Elsewhere these files do not exist; then a process counts as never stopped and never kept waiting.
"""

from __future__ import annotations

import os
from pathlib import Path


class RunnableClock:
    """Seconds in which a process could have computed: those in which none of its threads waited for a processor or for
    a disk. On an overloaded machine it goes slower than the wall's clock, so a slow engine is not taken for a hung one.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._tasks = proc / str(pid) / "task"
        self._counted = 0.0
        """Seconds up to the first of the close looks in a row."""
        self._watched = 0.0
        """Seconds of the wall's clock since."""
        self._first: dict[str, float] = {}
        """By thread: seconds it had waited for a processor when it was first looked at."""
        self._kept: dict[str, float] = {}
        """By thread: seconds since then that it was kept waiting."""
        self._blocked: dict[str, float] = {}
        """By thread: those of them that it waited for a disk."""

    @property
    def seconds(self) -> float:
        # The longest, not the sum: a hundred threads that wait a little each do not keep a process waiting.
        return self._counted + self._watched - max(self._kept.values(), default=0.0)

    def advance(self, elapsed: float, *, closely: bool) -> None:
        """Count `elapsed` seconds of the wall's clock, less what the process was kept waiting.

        Looking costs two reads per thread, so look closely only while there is a reason to; the first close look after
        others counts all that elapsed, for nothing is known yet to compare with. The kernel tells of a wait when it is
        over, so the clock may go back a little.
        """
        if not closely:
            self._counted = self.seconds + elapsed
            self._watched, self._first, self._kept, self._blocked = 0.0, {}, {}, {}
            return
        self._watched += elapsed
        for task in self._threads():
            name, (waited, blocked) = task.name, _condition(task)
            if name in self._first and blocked:
                self._blocked[name] = self._blocked.get(name, 0.0) + elapsed
            waited -= self._first.setdefault(name, waited)
            self._kept[name] = max(0.0, waited) + self._blocked.get(name, 0.0)

    def _threads(self) -> list[Path]:
        try:
            return list(self._tasks.iterdir())
        except OSError:
            return []


def _condition(task: Path) -> tuple[float, bool]:
    """Seconds that a thread has waited for a processor, and whether it waits for a disk now."""
    try:
        waited = int((task / "schedstat").read_bytes().split()[1]) / 1e9
        return waited, state(task) == "D"
    except (OSError, IndexError):  # it has ended, or the kernel keeps no such statistics
        return 0.0, False


def state(process: Path) -> str:
    """The state letter of a process or thread, of its directory in /proc; empty when there is none."""
    try:
        # The name before it may contain anything, spaces and brackets too.
        return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_stopped(pid: int) -> bool:
    """By SIGSTOP or a debugger."""
    return state(Path("/proc") / str(pid)) in ("T", "t")


def oom_kills(root: Path = Path("/")) -> int | None:
    """Processes that the kernel has killed for want of memory, in our control group or else on this machine."""
    for path in (*_control_group_files(root), root / "proc/vmstat"):
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, KeyError, ValueError):
            continue
    return None


def _control_group_files(root: Path) -> list[Path]:
    """Version 2's memory.events of the group that we, and so our children, are in."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    names = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return [root / "sys/fs/cgroup" / name / "memory.events" for name in names]


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where there is no /proc."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
