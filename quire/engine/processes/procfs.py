"""A process's state, waiting time and memory, read from Linux's /proc and control groups. On other systems no process
counts as stopped or waiting.
"""

from __future__ import annotations

import os
from pathlib import Path

from quire.engine.common import clock


class WatchTimer:
    """Measures the time between checks of another process. Time in which this process could not check does not count,
    because the other process may have been stopped too.
    """

    def __init__(self, period: float) -> None:
        """`period`: seconds between checks. A longer interval counts as at most twice this."""
        self._period = period
        self._last_look = clock.monotonic()

    def measure_elapsed(self) -> float:
        last, self._last_look = self._last_look, clock.monotonic()
        return min(self._last_look - last, 2 * self._period)


class RunnableClock:
    """Counts the seconds in which a process could compute: wall-clock time minus the longest time that one of its
    threads waited for a processor or a disk. So an engine that is slow on an overloaded machine does not count as
    hanging.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._tasks = proc / str(pid) / "task"
        self._before_inspection = 0.0
        """This clock's seconds before the current series of inspections."""
        self._inspected = 0.0
        """Wall-clock seconds in the current series of inspections."""
        self._initial_cpu_wait: dict[str, float] = {}
        """Seconds that each thread had waited for a processor before its first inspection."""
        self._waited: dict[str, float] = {}
        self._disk_wait: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        # The longest wait counts, not the sum, because a hundred short waits do not stop a process.
        return self._before_inspection + self._inspected - max(self._waited.values(), default=0.0)

    def advance(self, elapsed: float, *, inspect: bool) -> None:
        """Adds `elapsed` wall-clock seconds. With `inspect`, also reads how long each thread has waited (two files per
        thread), and subtracts the longest wait in this series of inspections, which a call without `inspect` ends. The
        kernel reports a wait only when it is over, so the clock may go back a little.
        """
        if not inspect:
            self._before_inspection = self.seconds + elapsed
            self._inspected = 0.0
            self._initial_cpu_wait = {}
            self._waited = {}
            self._disk_wait = {}
            return
        self._inspected += elapsed
        for task in self._threads():
            name, (cpu_wait, waits_for_disk) = task.name, _thread_waits(task)
            if name in self._initial_cpu_wait and waits_for_disk:
                self._disk_wait[name] = self._disk_wait.get(name, 0.0) + elapsed
            cpu_wait -= self._initial_cpu_wait.setdefault(name, cpu_wait)
            self._waited[name] = max(0.0, cpu_wait) + self._disk_wait.get(name, 0.0)

    def _threads(self) -> list[Path]:
        try:
            return list(self._tasks.iterdir())
        except OSError:
            return []


class Standstill:
    """Measures for how long a process used no processor time although it could have computed."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._folder = proc / str(pid)
        self._clock = RunnableClock(pid, proc)
        self._used = _processor_ticks(self._folder)
        self._since = 0.0

    def advance(self, elapsed: float) -> float:
        """Adds `elapsed` wall-clock seconds. Returns the seconds of standstill."""
        self._clock.advance(elapsed, inspect=True)
        used = _processor_ticks(self._folder)
        if used is None or used != self._used:
            self._used, self._since = used, self._clock.seconds
        return self._clock.seconds - self._since


class Stopped:
    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def advance(self, pid: int, elapsed: float) -> float:
        """Adds `elapsed` wall-clock seconds. Returns for how many seconds the process has been stopped."""
        self._seconds[pid] = self._seconds.get(pid, 0.0) + elapsed if is_stopped(pid) else 0.0
        return self._seconds[pid]


def _processor_ticks(process: Path) -> int | None:
    """In clock ticks; None if unreadable. `process`: its directory in /proc."""
    try:
        # These are fields 14 and 15. `state` explains the split.
        user, system = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[11:13]
        return int(user) + int(system)
    except (OSError, ValueError):
        return None


def _thread_waits(task: Path) -> tuple[float, bool]:
    """Returns the total seconds spent waiting for a processor, and whether the thread now waits for a disk."""
    try:
        cpu_wait = int((task / "schedstat").read_bytes().split()[1]) / 1e9
        return cpu_wait, state(task) == "D"
    except (OSError, IndexError):  # the thread has ended, or the kernel has no such statistics
        return 0.0, False


def state(process: Path) -> str:
    """Returns a process's or thread's state letter, or "" if it does not exist."""
    try:
        # The process's name comes first, in brackets, and may itself contain spaces and brackets.
        return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_stopped(pid: int) -> bool:
    return state(Path("/proc") / str(pid)) in ("T", "t")


def exit_signal(pid: int) -> int | None:
    """Returns the signal that ended a process whose parent has not reaped it yet; 0 if none did or the kernel hides it;
    None if unknown.
    """
    try:
        return (
            int((Path("/proc") / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[49]) & 0x7F
        )
    except (OSError, IndexError, ValueError):
        return None


def oom_kills(root: Path = Path("/")) -> int | None:
    """Returns how many processes the kernel killed for lack of memory in our control group, or on the machine if the
    group does not report it; None if unknown.
    """
    for path in (*_control_group_files(root), root / "proc/vmstat"):
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, KeyError, ValueError):
            continue
    return None


def _control_group_files(root: Path) -> list[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    names = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return [root / "sys/fs/cgroup" / name / "memory.events" for name in names]


def resident_bytes() -> int:
    """Returns 0 without /proc."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
