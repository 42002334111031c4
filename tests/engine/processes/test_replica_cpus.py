"""Tests that the number of threads follows the CPUs a process may use, cgroup quotas included (issue 58)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.engine.client.replica_shares import replica_config
from quire.engine.common.config import EngineConfig
from quire.engine.processes.cpu_cores import cpu_quota, usable_cpus

ALLOWED = len(os.sched_getaffinity(0))


def write_files(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        ({"sys/fs/cgroup/cpu.max": "nonsense\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
            },
            3.0,
        ),
        ({"proc/self/cgroup": "0::/../elsewhere\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1.0),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000\n",
            },
            2.0,
        ),
        (
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            None,
        ),
    ],
)
def test_usable_cpus_respects_cgroup_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpu_quota(write_files(tmp_path, files)) == quota
    expected = ALLOWED if quota is None else max(min(ALLOWED, int(quota)), 1)
    assert usable_cpus(tmp_path) == expected


def test_usable_cpus_respects_cpu_affinity(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cpus(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, before)


def test_replica_threads_respect_cpu_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    root = write_files(tmp_path, {"sys/fs/cgroup/cpu.max": "100000 100000\n"})
    config = EngineConfig(model="m", data_parallel_size=2)
    cores = [set(range(16)), set(range(16, 32))]
    assert replica_config(config, 0, cores, root).threads == 1
