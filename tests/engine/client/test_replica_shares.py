"""replica_config divides a machine among replicas, and the stats and views of several engines merge into one."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

from quire.engine.client import replica_shares
from quire.engine.client.replica_shares import replica_config
from quire.engine.common.config import EngineConfig
from quire.engine.core.engine_view import (
    CACHED_BLOCK,
    EMPTY_BLOCK,
    FIRST_OWNER,
    SHARED_BLOCK,
    UNLISTED_OWNER,
    merge_views,
)
from quire.engine.core.stats import EngineStats, EngineView, RequestView, TierStats, sum_stats
from quire.engine.processes.cpu_cores import threads_on


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_shares, "allowed_cores", lambda: {*range(8)})
    monkeypatch.setattr(replica_shares, "threads_on", len)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_replica_config_divides_memory_disk_and_threads() -> None:
    config = EngineConfig(
        data_parallel_size=2,
        threads=5,
        kv_cache_memory=3,
        kv_offload_memory=1,
        kv_offload_disk=8,
        kv_offload_dir="/tmp/kv",
        num_kv_blocks=100,
    )
    configs = [replica_config(config, number, [set(), set()]) for number in range(2)]
    assert [each.kv_offload_dir for each in configs] == ["/tmp/kv/replica-0", "/tmp/kv/replica-1"]
    for each in configs:
        assert (each.threads, each.num_kv_blocks) == (2, 100)
        assert (each.kv_cache_memory, each.kv_offload_memory, each.kv_offload_disk) == (1.5, 0.5, 4.0)
        assert each.data_parallel_size == 2, "an engine fits what nobody gave into its part too"


def test_replica_config_divides_default_offload_disk() -> None:
    config = EngineConfig(data_parallel_size=4, kv_offload_dir="/tmp/kv")
    assert replica_config(config, 0, [set()] * 4).kv_offload_disk == 2.5


def test_replica_config_leaves_unset_memory_to_engine() -> None:
    config = replica_config(EngineConfig(data_parallel_size=3), 0, [set()] * 3)
    assert (config.kv_cache_memory, config.kv_offload_memory, config.kv_offload_dir) == (None, None, None)
    assert config.threads == 2


@pytest.mark.parametrize(
    ("cores", "threads"),
    [
        ([{0, 1, 2}, {3, 4, 5, 6, 7}], [3, 5]),
        ([{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5}], [2, 2, 2]),
        ([{0}, {0}], [1, 1]),
    ],
)
def test_replicas_of_node_share_its_cores_as_threads(cores: list[set[int]], threads: list[int]) -> None:
    config = EngineConfig(data_parallel_size=len(cores))
    assert [replica_config(config, number, cores).threads for number in range(len(cores))] == threads


def test_omp_num_threads_applies_to_each_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert replica_config(EngineConfig(data_parallel_size=2), 0, [set()] * 2).threads is None
    assert replica_config(EngineConfig(data_parallel_size=2, threads=6), 0, [set()] * 2).threads == 3


def test_threads_on_counts_one_thread_per_physical_core(tmp_path: Path) -> None:
    for core, siblings in {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5", 2: "2"}.items():
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert threads_on({0, 1, 2, 4, 5}, tmp_path) == 3
    assert threads_on({4, 5}, tmp_path) == 2
    assert threads_on({7, 8}, tmp_path) == 2, "of these nothing is known"


def test_sum_stats_adds_gauges_and_counters() -> None:
    tiers = [TierStats("host", pages=2, bytes=20, fetched_pages=1), TierStats("disk", pages=1, stored_pages=5)]
    one = EngineStats(running=1, waiting=2, used_blocks=3, total_blocks=10, steps=7, accepted_drafts=[1], tiers=tiers)
    two = EngineStats(running=4, total_blocks=10, steps=1, accepted_drafts=[1, 2], tiers=tiers[1:])
    total = sum_stats([one, two])
    assert (total.running, total.waiting, total.used_blocks, total.total_blocks, total.steps) == (5, 2, 3, 20, 8)
    assert total.accepted_drafts == [2, 2]
    assert {tier.name: (tier.pages, tier.bytes, tier.stored_pages) for tier in total.tiers} == {
        "host": (2, 20, 0),
        "disk": (2, 0, 10),
    }
    assert sum_stats([one]) == one


def make_view(names: list[str], codes: list[int]) -> EngineView:
    sequences = [RequestView(name, "decode", 1, 0, 1, 0, 1, 1, 0, 0) for name in names]
    pages = zlib.compress(np.array(codes, dtype="<u2").tobytes())
    return EngineView(EngineStats(running=len(names)), sequences, pages, 5, 0.5)


def test_merge_views_keeps_owners_of_kv_blocks() -> None:
    one = make_view(["a", "b"], [FIRST_OWNER + 1, EMPTY_BLOCK, FIRST_OWNER])
    two = make_view(["c"], [CACHED_BLOCK, FIRST_OWNER, UNLISTED_OWNER, SHARED_BLOCK + 3])
    merged = merge_views([one, two])
    codes = np.frombuffer(zlib.decompress(merged.block_codes), dtype="<u2").tolist()
    owners = [
        merged.requests[code - FIRST_OWNER].id if CACHED_BLOCK < code < UNLISTED_OWNER else code for code in codes
    ]
    assert owners == ["b", EMPTY_BLOCK, "a", CACHED_BLOCK, "c", UNLISTED_OWNER, SHARED_BLOCK + 3]
    assert (merged.stats.running, merged.resident_bytes) == (3, 10)
