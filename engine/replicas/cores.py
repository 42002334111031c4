"""Which cores each rank, or replica, gets on a machine of several NUMA nodes. Linux gives a thread memory of the node
that it runs on, so one that stays on its cores reads its weights and pages from near memory."""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path


def node_cores(count: int, allowed: Set[int], root: Path = Path("/")) -> list[Set[int]] | None:
    """The cores of each of `count` processes, of those `allowed`: of one node or, where there are more nodes than
    processes, of several. None where there is one node, or none is known."""
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
    """How many threads should compute on these cores: one for each that is not another's hyper-thread."""
    firsts = set()
    for core in cores:
        try:
            listed = (root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text("ascii")
            firsts.add(min(_listed(listed) & cores))
        except (OSError, ValueError):
            firsts.add(core)
    return len(firsts)


def stay_on(cores: Set[int]) -> None:
    """Keep this thread, and those that it will start, on these cores; none: leave it as it is."""
    if cores:
        os.sched_setaffinity(0, cores)


def _nodes(root: Path) -> list[Set[int]]:
    """The cores of each node, in the order of their numbers."""
    folders = root.glob("sys/devices/system/node/node[0-9]*")
    found: list[Set[int]] = []
    for folder in sorted(folders, key=lambda each: int(each.name.removeprefix("node"))):
        try:
            found.append(_listed((folder / "cpulist").read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return found


def _listed(text: str) -> Set[int]:
    """The numbers of a list such as 0-3,8."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
