"""Weights received over a torch.distributed group from a trainer in another process."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.client.engine_client import EngineClient
from quire.engine.client.process_client import ProcessClient
from quire.engine.client.weight_broadcast import Group, Tensor, WeightsGroup
from quire.engine.client.weights import Weights
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError, EngineError, InvalidRequest
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.common.weight_receiver import WeightReceiverMethods
from quire.engine.processes.frames import encode_frame, read_frame
from quire.engine.processes.utility_calls import decode_utility_result, make_call
from tests.e2e.server import free_port
from tests.tiny_models import save_tiny_model

FILE = "model.safetensors"
PROMPT = [3 + 7 * index % 300 for index in range(40)]
TRAINER = """
import datetime, os, sys, torch.distributed as dist
from safetensors.torch import load_file
port, file, most = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
for sent, (name, tensor) in enumerate(sorted(load_file(file).items())):
    if sent == int(most):
        os._exit(1)
    dist.broadcast(tensor, src=0)
dist.barrier()
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of the same shape with different weights."""
    first = save_tiny_model(tmp_path_factory.mktemp("first"), "llama")
    second = tmp_path_factory.mktemp("second")
    shutil.copy(first / "config.json", second)
    torch.manual_seed(5)
    tensors = {name: each + torch.randn_like(each) * 0.1 for name, each in load_file(first / FILE).items()}
    save_file(tensors, second / FILE)
    return first, second


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder), dtype="float32", device="cpu", threads=1, num_kv_blocks=64, warmup_seconds=0.0
    )


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[EngineClient, WeightsGroup]]:
    client = EngineClient(ProcessClient(config_of(folder)))
    group = WeightsGroup(Weights(client))
    await client.engine_core.start()
    try:
        yield client, group
    finally:
        await client.engine_core.stop()
        await group.close()


async def answer(client: EngineClient) -> list[int]:
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    request = EngineCoreRequest(id=f"r{os.urandom(4).hex()}", prompt_ids=PROMPT, params=params, seed=1)
    return [
        each for outputs in [o async for o in client.submit([request])] for output in outputs for each in output.new_ids
    ]


async def answer_of(folder: Path) -> list[int]:
    async with serving(folder) as (client, _):
        return await answer(client)


def tensors_of(folder: Path) -> list[Tensor]:
    kinds = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    return [
        Tensor(name, kinds[each.dtype], list(each.shape)) for name, each in sorted(load_file(folder / FILE).items())
    ]


@asynccontextmanager
async def trainer(group: WeightsGroup, folder: Path, most: int = 10**6) -> AsyncIterator[None]:
    """Send a folder's weights over a group with `group`; exit before tensor number `most`."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TRAINER, str(port), str(folder / FILE), str(most)
    )
    try:
        await group.join(Group("127.0.0.1", port, 1, 2, "gloo", 60.0))
        yield
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.slow
async def test_broadcast_weights_are_served_after_all_buckets_arrive(folders: tuple[Path, Path]) -> None:
    after = await answer_of(folders[1])
    async with serving(folders[0]) as (client, group):
        before = await answer(client)
        assert before != after
        tensors = tensors_of(folders[1])
        async with trainer(group, folders[1]):
            await group.receive(tensors[:4])
            assert await answer(client) == before
            await group.receive(tensors[4:])
            assert await answer(client) == before
            assert await group.serve(version="trained") == "trained"
        assert await answer(client) == after
        async with trainer(group, folders[0]):
            await group.receive(tensors)
            assert await group.serve() == "3", "they are counted"
            await group.leave()
        assert await answer(client) == before
        assert group._root is not None
        assert os.listdir(group._root) == ["2"], "only what is served is kept"
        root = group._root
    assert not root.exists()


@pytest.mark.slow
async def test_weights_stay_unchanged_when_trainer_dies(folders: tuple[Path, Path]) -> None:
    async with serving(folders[0]) as (client, group):
        before = await answer(client)
        tensors = tensors_of(folders[1])
        async with trainer(group, folders[1], most=6):
            await group.receive(tensors[:4])
            with pytest.raises(InvalidRequest, match="the process group failed"):
                await group.receive(tensors[4:])
        with pytest.raises(InvalidRequest, match="init_weights_group"):
            await group.receive(tensors)
        with pytest.raises(InvalidRequest, match="no tensor"):
            await group.serve()
        assert await answer(client) == before
        assert client.engine_core.weights_version == "1"
        async with trainer(group, folders[1]):
            await group.receive(tensors)
            await group.serve()
        assert await answer(client) != before


@pytest.mark.slow
async def test_killed_weight_receiver_is_replaced(folders: tuple[Path, Path]) -> None:
    async with serving(folders[0]) as (client, group):
        before = await answer(client)
        tensors = tensors_of(folders[1])
        async with trainer(group, folders[1]):
            await group.receive(tensors[:4])
            assert group._process is not None
            group._process.kill()
            await group._process.wait_for_exit()
            with pytest.raises(EngineError, match="the process group is gone"):
                await group.receive(tensors[4:])
        assert await answer(client) == before
        async with trainer(group, folders[1]):
            await group.receive(tensors)
            await group.serve()
        assert await answer(client) != before


@pytest.mark.slow
async def test_broadcast_weights_of_wrong_shape_are_rejected(folders: tuple[Path, Path], tmp_path: Path) -> None:
    async with serving(folders[0]) as (client, group):
        before = await answer(client)
        tensors = load_file(folders[0] / FILE)
        save_file({name: torch.cat([each, each]) for name, each in tensors.items()}, tmp_path / FILE)
        async with trainer(group, tmp_path):
            await group.receive(tensors_of(tmp_path))
            with pytest.raises(ConfigError, match="has shape"):
                await group.serve()
        assert await answer(client) == before
        assert group._root is not None
        assert os.listdir(group._root) == []


def test_weight_receiver_deletes_files_when_parent_disconnects(tmp_path: Path) -> None:
    """As when the server process is killed."""
    root = tmp_path / "root"
    (root / "1").mkdir(parents=True)
    parent_socket, child_socket = socket.socketpair()
    with child_socket:
        command = [sys.executable, "-m", "quire.engine.worker.weight_receiver", str(child_socket.fileno()), str(root)]
        process = subprocess.Popen(command, pass_fds=(child_socket.fileno(),))
    with parent_socket:
        parent_socket.sendall(encode_frame(make_call(WeightReceiverMethods.leave, 1)))
        result = read_frame(parent_socket.makefile("rb"))
        assert result is not None
        assert decode_utility_result(result).error is None
        parent_socket.shutdown(socket.SHUT_RDWR)
    assert process.wait(60) == 0
    assert not root.exists()


@pytest.mark.slow
async def test_weights_group_join_reports_missing_members(folders: tuple[Path, Path]) -> None:
    async with serving(folders[0]) as (client, group):
        with pytest.raises(InvalidRequest, match="the process group failed"):
            await group.join(Group("127.0.0.1", free_port(), 1, 2, "gloo", 1.0))
        assert len(await answer(client)) == 12
