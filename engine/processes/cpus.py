"""How many CPUs this process may use: those that it may run on, and as much of their time as its control group has.

`docker run --cpus 2` and a Kubernetes limit give a share of all CPUs' time: more threads than that would only wait for
one another while the group is throttled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = "sys/fs/cgroup"


def usable_cpus(root: Path = Path("/")) -> int:
    """At least 1. root: where sys and proc are looked for."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return allowed if quota is None else max(min(allowed, int(quota)), 1)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that this process's control groups (v2 or v1), and those around them, get; None: no limit."""
    return min((quota for folder in _groups(root) if (quota := _quota_of(folder)) is not None), default=None)


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's groups that limit CPUs, each with all around it. A container may see its own group
    as the root, or its path in the host's tree: a folder that is not there says nothing."""
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
