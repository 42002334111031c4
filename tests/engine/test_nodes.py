"""Tensor parallelism on several machines: the tokens of one process, which nodes may join, and rejected settings."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from pydantic import ValidationError

from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.common.errors import ConfigError, EngineError
from quire.engine.engine_core import EngineCore, free_engine_memory
from quire.engine.processes.utility_calls import encode
from quire.engine.worker.device_memory import AvailableMemory
from quire.engine.worker.ranks.remote_ranks import (
    JOIN_QUEUE,
    SILENCE_TIMEOUT,
    JoinRequest,
    JoinVerdict,
    RankAssignment,
    RemoteRank,
    make_join_request,
)
from quire.engine.worker.ranks.rendezvous import connect_store
from quire.engine.worker.ranks.spmd import SpmdRanks, SpmdRunner
from quire.engine.worker_node import NodeHeartbeat
from quire.kernels.cpu.backend import CpuBackend
from quire.kernels.reference import ReferenceBackend
from tests.engine.harness import run
from tests.engine.nodes import Nodes, ThreadMember, gathering, member_config, nodes, told
from tests.engine.ranks import thread_ranks
from tests.engine.test_ranks import BASE, QUANTIZED, SMALL, asked, asked_with_adapters, assert_same, quantized_model
from tests.tiny_models import save_tiny_model

__all__ = ["nodes", "thread_ranks"]
MISSING = CpuBackend().missing_reason
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.usefixtures("thread_ranks", "one_thread"),
]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    free_engine_memory()


def engine(path: Path | str, **settings: Any) -> EngineCore:
    return EngineCore(EngineConfig(model=str(path), **BASE | settings))


def ranks_of(made: EngineCore) -> SpmdRanks:
    assert isinstance(made.executor, SpmdRunner)
    return made.executor._ranks


@pytest.mark.parametrize(("family", "ranks", "count"), [("llama", 2, 2), ("gemma3", 4, 2), ("qwen3", 4, 4)])
def test_multi_node_tokens_equal_single_process(
    family: str, ranks: int, count: int, nodes: Nodes, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, family)
    divided = engine(path, **nodes(str(path), ranks, count), **SMALL)
    answers = run(divided, asked())
    assert_same(answers, run(engine(path, **SMALL), asked()))
    assert sum(isinstance(each, RemoteRank) for each in ranks_of(divided)._processes) == ranks - ranks // count
    assert "on 127.0.0.1" in divided.info.notes[0]
    for each in asked():
        divided.reset_prefix_cache()
        (alone,) = run(divided, [each]).values()
        assert (alone.ids, alone.logprobs) == (answers[each.id].ids, answers[each.id].logprobs)


@pytest.mark.parametrize("way", [*QUANTIZED, "int8", "int4", "fp8"])
def test_multi_node_quantized_weights_equal_single_process(
    way: str, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without integer products: see test_ranks.py."""
    monkeypatch.setattr(CpuBackend, "pack_quantized", ReferenceBackend.pack_quantized)
    monkeypatch.setattr(CpuBackend, "pack_quantized_embedding", ReferenceBackend.pack_quantized_embedding)
    path, settings = quantized_model(way, tmp_path)
    assert_same(run(engine(path, **nodes(str(path), 2), **settings), asked()), run(engine(path, **settings), asked()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_multi_node_int4_logprobs_do_not_depend_on_batch(dtype: str, nodes: Nodes) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "quantization": "int4", "max_model_len": 128, "num_kv_blocks": 64}
    divided = engine(DEMO_MODEL, **settings, **nodes(DEMO_MODEL, 2))
    answers = run(divided, asked())
    for each in asked():
        divided.reset_prefix_cache()
        (alone,) = run(divided, [each]).values()
        assert (alone.ids, alone.logprobs) == (answers[each.id].ids, answers[each.id].logprobs)


def test_multi_node_adapters_are_sent_once(nodes: Nodes, tmp_path: Path) -> None:
    """Two slots for three adapters: one is loaded again without its files being sent again."""
    path, requests = asked_with_adapters(tmp_path)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64}
    divided = engine(path, **lora, **nodes(str(path), 2))
    expected = run(engine(path, **lora), requests)
    assert_same(run(divided, requests), expected)
    divided.reset_prefix_cache()
    assert_same(run(divided, requests), expected)
    assert len(ranks_of(divided)._sent_adapters) == 3


def test_unreadable_adapter_fails_only_dependent_requests(nodes: Nodes, tmp_path: Path) -> None:
    path, requests = asked_with_adapters(tmp_path)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64}
    divided, alone = engine(path, **lora, **nodes(str(path), 2)), engine(path, **lora)
    for folder in {each.adapter.folder for each in requests if each.adapter is not None}:
        shutil.rmtree(folder)
    answers, expected = run(divided, requests), run(alone, requests)
    reasons = {key: each.finish_reason for key, each in answers.items()}
    assert reasons == {key: each.finish_reason for key, each in expected.items()}
    assert len(set(reasons.values())) == 2
    assert not ranks_of(divided)._sent_adapters


def test_node_with_different_weights_is_rejected(nodes: Nodes, tmp_path: Path) -> None:
    here, there = save_tiny_model(tmp_path / "here", "llama"), tmp_path / "there"
    shutil.copytree(here, there)
    content = bytearray((there / "model.safetensors").read_bytes())
    content[-1000:] = b"\0" * 1000
    (there / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model: the machine at 127\.0\.0\.1 has other weights than machine 0"):
        engine(here, **nodes(str(there), 2))


def test_nodes_may_use_different_model_paths_for_successive_engines(nodes: Nodes, tmp_path: Path) -> None:
    here, there = save_tiny_model(tmp_path / "here", "llama"), tmp_path / "there"
    there.symlink_to(here)
    told = nodes(str(there), 2)
    expected = run(engine(here), asked())
    for _ in range(2):
        assert_same(run(engine(here, **told), asked()), expected)
        free_engine_memory()


def test_node_with_least_memory_limits_kv_blocks(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path, "llama")
    available = AvailableMemory(300_000, 0)
    monkeypatch.setattr("quire.engine.worker.ranks.follower_rank.measure_available_memory", lambda *_: available)
    made = engine(path, **nodes(str(path), 4), max_model_len=64)
    each = sum(tensor.total_bytes for layer in made.executor._model.block_tensor_specs(1) for tensor in layer)
    assert made.info.num_blocks == 300_000 // (2 * each)
    engine_with_fixed_memory = engine(path, **nodes(str(path), 2), max_model_len=64, kv_cache_memory=0.01)
    assert engine_with_fixed_memory.info.num_blocks > made.info.num_blocks


def test_killed_node_ends_engine(nodes: Nodes, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    made = engine(path, **nodes(str(path), 2))
    for each in asked():
        made.add_request(each)
    made.step()
    (remote,) = ranks_of(made)._processes
    remote.kill()
    with pytest.raises(EngineError, match=r"rank 1 of 2 .process .* on 127.0.0.1. was killed by SIGKILL"):
        run(made, [])


def join_verdict(settings: dict[str, Any], join: JoinRequest) -> JoinVerdict:
    """The leader's verdict on a join request."""
    store = connect_store((settings.get("master_addr", "127.0.0.1"), settings["master_port"]))
    store.set_timeout(timedelta(seconds=30))
    store.queue_push(JOIN_QUEUE, encode(replace(join, host="127.0.0.1", reply=(reply := uuid.uuid4().hex))))
    return msgspec.msgpack.decode(store.queue_pop(reply), type=JoinVerdict)


def node_heartbeat(settings: dict[str, Any], rank: int, silence: timedelta = SILENCE_TIMEOUT) -> NodeHeartbeat:
    """The heartbeat of a rank."""
    return NodeHeartbeat(
        RankAssignment(("127.0.0.1", settings["master_port"]), rank, {}, [], 0, "127.0.0.1", ""), silence
    )


def test_foreign_connections_do_not_block_joining_nodes(capfd: pytest.CaptureFixture[str]) -> None:
    settings = told()
    _, thread, joined_ranks = gathering(settings)
    place, rng, idle = ("127.0.0.1", settings["master_port"]), random.Random(1), []
    for size in (0, 1, 40, 5000):
        with socket.create_connection(place, 30) as one:
            one.sendall(rng.randbytes(size))
    for _ in range(80):
        idle.append(socket.create_connection(place, 30))
    connect_store(place).queue_push(JOIN_QUEUE, b"\xff" * 40)
    assert join_verdict(settings, make_join_request(member_config(settings), 1, 0, 77)) == JoinVerdict("", final=False)
    thread.join(30)
    assert [each.pid for each in joined_ranks] == [77]
    for one in idle:
        one.close()
    assert "a connection that is not one of the machines tried to join" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size is 2 on machine 0 and 4 there"),
        ({"tensor_parallel_size": 3, "nnodes": 3}, "nnodes is 2 on machine 0 and 3 there; tensor_parallel_size is 2"),
        ({"model": "other"}, "model: another config.json"),
    ],
)
def test_node_with_different_config_is_rejected(changed: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    settings = told()
    _, thread, joined_ranks = gathering(settings)
    if "model" in changed:
        changed = {"model": str(save_tiny_model(tmp_path, "llama"))}
    other = EngineConfig(**{"model": DEMO_MODEL} | settings | {"node_rank": 1} | changed)
    refused = join_verdict(settings, make_join_request(other, 1, 0, 5))
    assert wrong in refused.refused
    assert refused.final
    config = member_config(settings)
    for node, place in ((0, 0), (1, 1), (1, -1)):
        assert "there is no rank" in join_verdict(settings, make_join_request(config, node, place, 5)).refused
    assert not join_verdict(settings, make_join_request(config, 1, 0, 6)).refused
    thread.join(30)
    assert [each.pid for each in joined_ranks] == [6]


def test_node_with_different_kernels_is_rejected_naming_both(
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = told()
    _, thread, joined_ranks = gathering(settings)
    own = make_join_request(member_config(settings), 1, 0)
    member, ours = ThreadMember(member_config(settings), replace(own, kernels="NEON, PyTorch 9")), own.kernels
    member.keep_rank_running(0)
    wrong = f"machine 1 cannot join: what computes is {ours} on machine 0 and NEON, PyTorch 9 there"
    assert str(member.failure) == f"node_rank: 127.0.0.1:{settings['master_port']} refused: {wrong}"
    assert f"quire: {wrong}\n" in capfd.readouterr().err
    assert not join_verdict(settings, make_join_request(member_config(settings), 1, 0, 6)).refused
    thread.join(30)
    assert [each.pid for each in joined_ranks] == [6]


def test_rank_is_reassigned_only_after_node_falls_silent() -> None:
    settings, silence = told() | {"tensor_parallel_size": 4}, timedelta(seconds=2)
    _, thread, joined_ranks = gathering(settings, silence)
    config = member_config(settings)
    assert not join_verdict(settings, make_join_request(config, 1, 0, 5)).refused
    assert join_verdict(settings, make_join_request(config, 1, 0, 6)) == JoinVerdict(
        "machine 1 has joined already", final=False
    )
    while join_verdict(settings, make_join_request(config, 1, 0, 7)).refused:  # until the leader notices
        time.sleep(0.05)
    lives = [node_heartbeat(settings, 2, silence)]
    assert not join_verdict(settings, make_join_request(config, 1, 1, 8)).refused
    lives.append(node_heartbeat(settings, 3, silence))
    thread.join(30)
    assert [each.pid for each in joined_ranks] == [7, 8]
    for life, remote, code in zip(lives, joined_ranks, (3, -signal.SIGSEGV), strict=True):
        life.report_exit(code)
        assert remote.wait() == code
        assert not remote.is_lost


def test_missing_node_ends_start_after_timeout() -> None:
    settings = told() | {"nodes_timeout": 0.3}
    with pytest.raises(ConfigError, match=r"nnodes: machine 1 of 2 has not joined 127.0.0.1:\d+ in 0.3 s") as raised:
        engine(DEMO_MODEL, **settings)
    assert raised.value.param == "nnodes"


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"nnodes": 2}, "nnodes: tensor_parallel_size 1 cannot be divided evenly among 2 machines"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "nnodes: tensor_parallel_size 3 cannot be divided evenly"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2},
            "node_rank: machine 2 is not one of the 2 of nnodes",
        ),
        ({"node_rank": 1}, "node_rank: machine 1 is not one of the 1 of nnodes"),
        ({"nnodes": 2, "pipeline_parallel_size": 2}, "nnodes: .* pipeline_parallel_size"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "nnodes: .* data_parallel_size"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "0.0.0.0"},
            "master_addr: other machines cannot reach 0.0.0.0",
        ),
    ],
)
def test_invalid_multi_node_settings_are_rejected(settings: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        EngineConfig(**settings)


def test_invalid_master_addr_and_node_rank_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"master_addr, master_port: cannot listen on 192\.0\.2\.1:"):
        engine(DEMO_MODEL, **told() | {"master_addr": "192.0.2.1"})
    with pytest.raises(ConfigError, match=r"master_addr: .no\.such\.host\.invalid. is not the address"):
        engine(DEMO_MODEL, **told() | {"master_addr": "no.such.host.invalid"})
    with pytest.raises(ConfigError, match="node_rank: machines other than the first"):
        engine(DEMO_MODEL, **told() | {"node_rank": 1})
