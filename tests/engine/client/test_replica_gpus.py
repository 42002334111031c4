"""Replicas on GPUs, without a GPU: real processes, started as `quire serve` starts them, that write down what they
see, on machines that are folders."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.engine_process import EngineProcess, Launcher
from quire.engine.client.replicated_client import processes
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.processes.gpus import TorchBuild, find_gpus
from tests.engine.fake_process import KILLED, FakeProcess
from tests.engine.processes.test_gpus import nvidia_machine

CHILD = """
import json, os, pathlib, sys
names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "MALLOC_TRIM_THRESHOLD_", "HOME")
config = json.loads(sys.stdin.readline())
seen = {"env": {name: os.environ.get(name) for name in names}, "config": config}
pathlib.Path(sys.argv[1], f"{os.getpid()}.json").write_text(json.dumps(seen))
"""


class Witness(EngineProcess):
    """Writes its environment and its configuration into a file named after its process id, and ends."""

    PROGRAM: ClassVar[tuple[str, ...]] = ()


def started(tmp_path: Path, environment: Mapping[str, str], gpus: int, **settings: object) -> list[dict[str, object]]:
    """What each replica sees, in order, with its configuration."""
    folder = tmp_path / "seen"
    folder.mkdir()
    (tmp_path / "child.py").write_text(CHILD)

    class Here(Witness):
        PROGRAM = (str(tmp_path / "child.py"), str(folder))

    find = partial(
        find_gpus, build=TorchBuild(cuda="13.0"), environment=environment, root=nvidia_machine(tmp_path, gpus)
    )

    async def run() -> list[int]:
        client = processes(EngineConfig(**settings), Launcher(Here), find)
        client.engine_core.launch()
        pids = [each.pid for each in client.engine_core._replicas]
        for _ in range(1000):
            if len(list(folder.iterdir())) == len(pids) and all(each.stat().st_size for each in folder.iterdir()):
                break
            await asyncio.sleep(0.02)
        await client.engine_core.stop()
        return pids

    return [json.loads((folder / f"{pid}.json").read_text()) for pid in asyncio.run(run())]


@pytest.mark.parametrize(
    ("listed", "ranks", "expected"),
    [
        (None, 1, ["0", "1"]),
        (None, 2, ["0,1", "2,3"]),
        ("3,1", 1, ["3", "1"]),
        ("GPU-aa,GPU-bb,GPU-cc,GPU-dd", 2, ["GPU-aa,GPU-bb", "GPU-cc,GPU-dd"]),
    ],
)
def test_replica_sees_only_its_own_gpus(tmp_path: Path, listed: str | None, ranks: int, expected: list[str]) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    seen = started(tmp_path, environment, 4, data_parallel_size=2, tensor_parallel_size=ranks, kv_cache_memory=8)
    assert [each["env"]["CUDA_VISIBLE_DEVICES"] for each in seen] == expected
    for each in seen:
        assert each["env"]["HOME"], "the rest is the server's"
        assert each["env"]["MALLOC_TRIM_THRESHOLD_"]
        assert each["config"]["device"] == "cuda"
        assert each["config"]["kv_cache_memory"] == 8, "of each GPU; on CPUs it is the sum"


def test_cpu_replicas_keep_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    seen = started(tmp_path, {}, 0, data_parallel_size=2, kv_cache_memory=8)
    for each in seen:
        assert each["env"]["CUDA_VISIBLE_DEVICES"] is None
        assert (each["config"]["device"], each["config"]["kv_cache_memory"]) == ("auto", 4)


def on_fake_machine(tmp_path: Path, gpus: int, **settings: int) -> EngineClient:
    find = partial(find_gpus, build=TorchBuild(cuda="13.0"), environment={}, root=nvidia_machine(tmp_path, gpus))
    return processes(EngineConfig(**settings), Launcher(FakeProcess), find)


def test_too_few_gpus_are_rejected_before_any_process_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 replicas need 3 GPUs, and 2 are visible here"):
        on_fake_machine(tmp_path, 2, data_parallel_size=3)


async def test_replaced_replica_gets_same_gpus_and_start_line_names_them(tmp_path: Path) -> None:
    client = on_fake_machine(tmp_path, 8, data_parallel_size=2, tensor_parallel_size=2)
    info = await client.engine_core.start()
    assert info.notes[-1] == (
        "2 replicas, each with weights and a KV cache as shown here: replica 0 on GPUs 0 and 1, replica 1 on GPUs 2 "
        "and 3. 8 GPUs are visible, 4 are used: --data-parallel-size 4 uses all it can"
    )
    replica = client.engine_core._replicas[1]
    first = replica._process
    assert isinstance(first, FakeProcess)
    first.exit(KILLED)
    for _ in range(200):
        await asyncio.sleep(0.01)
        if replica._process not in (None, first):
            break
    assert isinstance(replica._process, FakeProcess)
    assert replica._process.environment == first.environment == {"CUDA_VISIBLE_DEVICES": "2,3"}
    await client.engine_core.stop()
