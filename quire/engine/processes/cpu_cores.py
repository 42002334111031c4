"""Assigns cores to ranks or replicas, and counts usable CPUs. Linux allocates memory near the NUMA node where a thread
runs, so threads stay on their cores. `docker run --cpus 2` and Kubernetes limits grant a share of CPU time, so more
threads than that would only wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from pathlib import Path

_CGROUPS = "sys/fs/cgroup"


def node_cores(count: int, allowed: Set[int], root: Path = Path("/")) -> list[Set[int]] | None:
    """Returns each process's cores out of `allowed`: those of one NUMA node, or of several if there are more nodes than
    processes. If there are fewer, processes share nodes.
    """
    nodes = [cores & allowed for cores in _nodes(root)]
    nodes = [cores for cores in nodes if cores]
    if len(nodes) < 2 or count < 2:
        return None
    firsts = [index * len(nodes) // count for index in range(count)]
    ends = [max((index + 1) * len(nodes) // count, first + 1) for index, first in enumerate(firsts)]
    return [set().union(*nodes[first:end]) for first, end in zip(firsts, ends, strict=True)]


def allowed_cores() -> Set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def threads_on(cores: Set[int], root: Path = Path("/")) -> int:
    """Counts physical cores among `cores`."""
    firsts = set()
    for core in cores:
        try:
            listed = (root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text("ascii")
            firsts.add(min(_parse_core_list(listed) & cores))
        except (OSError, ValueError):
            firsts.add(core)
    return len(firsts)


def stay_on(cores: Set[int]) -> None:
    """Binds this thread, and those that it starts later, to `cores`."""
    if cores:
        os.sched_setaffinity(0, cores)


def _nodes(root: Path) -> list[Set[int]]:
    folders = root.glob("sys/devices/system/node/node[0-9]*")
    core_lists: list[Set[int]] = []
    for folder in sorted(folders, key=lambda each: int(each.name.removeprefix("node"))):
        try:
            core_lists.append(_parse_core_list((folder / "cpulist").read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return core_lists


def _parse_core_list(text: str) -> Set[int]:
    """`text`: a list such as 0-3,8."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def usable_cpus(root: Path = Path("/")) -> int:
    """Returns at least 1. `root` contains sys and proc."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return allowed if quota is None else max(min(allowed, int(quota)), 1)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns how many CPUs this process's control groups (v1 or v2) grant it; None if they set no limit."""
    return min((quota for folder in _groups(root) if (quota := _quota_of(folder)) is not None), default=None)


def _groups(root: Path) -> Iterator[Path]:
    """A container may see its group as the root or under its path on the host, so some folders may not exist."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    base = root / _CGROUPS
    yield from (base, base / "cpu", base / "cpu,cpuacct")
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        for start in [base] if not controllers else [base / controllers, base / "cpu"]:
            folder = start / path.lstrip("/")
            while folder != start and start in folder.parents:
                yield folder
                folder = folder.parent


def _quota_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii").strip()
        if quota == "max" or int(quota) <= 0 or int(period) <= 0:
            return None
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None
