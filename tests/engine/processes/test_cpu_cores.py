"""Tests which CPU cores ranks get, on machines described by folders."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from quire.engine.processes.cpu_cores import allowed_cores, node_cores, stay_on


def write_numa_nodes(root: Path, *nodes: str) -> Path:
    for number, cores in enumerate(nodes):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    return root


@pytest.mark.parametrize(
    ("nodes", "ranks", "expected"),
    [
        (["0-3", "4-7"], 2, [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        (["0-1,4-5", "2,3,6-7"], 2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (["0-1", "2-3"], 4, [{0, 1}, {0, 1}, {2, 3}, {2, 3}]),
        (["0", "1", "2", "3"], 2, [{0, 1}, {2, 3}]),
        (["0-1", "2-3", "4-5"], 2, [{0, 1}, {2, 3, 4, 5}]),
        (["0-1", "", "2-3"], 2, [{0, 1}, {2, 3}]),  # a node with memory but no cores
        (["0-7"], 2, None),
        ([], 2, None),
        (["0-3", "4-7"], 1, None),
        ([*(str(number) for number in range(12))], 12, [{number} for number in range(12)]),  # node10 is after node9
    ],
)
def test_node_cores_assigns_numa_nodes_to_ranks(
    nodes: list[str], ranks: int, expected: list[set[int]] | None, tmp_path: Path
) -> None:
    assert node_cores(ranks, set(range(16)), write_numa_nodes(tmp_path, *nodes)) == expected


def test_node_cores_uses_only_allowed_cores(tmp_path: Path) -> None:
    root = write_numa_nodes(tmp_path, "0-3", "4-7")
    assert node_cores(2, {2, 3, 4}, root) == [{2, 3}, {4}]
    assert node_cores(2, {0, 1}, root) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone can bind threads")
def test_stay_on_binds_only_calling_thread() -> None:
    before = allowed_cores()
    core, cores_of_thread = {min(before)}, []

    def work() -> None:
        stay_on(core)
        stay_on(set())
        cores_of_thread.append(allowed_cores())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert cores_of_thread == [core]
    assert allowed_cores() == before
