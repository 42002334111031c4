"""A model on several machines: the tokens of one process, who may join, and what is refused."""

from __future__ import annotations

import hmac
import random
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from quire.engine.config import DEMO_MODEL, NODE_SECRET, EngineConfig
from quire.engine.errors import ConfigError, EngineError
from quire.engine.loop import Engine, let_go
from quire.engine.nodes.greeting import Refused, introduce, join_of
from quire.engine.worker.ranks.remote import Remote
from quire.engine.worker.ranks.spmd import SpmdRanks, SpmdRunner
from quire.kernels.cpu.backend import Cpu
from quire.kernels.reference import Reference
from tests.engine.harness import run
from tests.engine.nodes import Nodes, ThreadMember, gathering, member_config, nodes, told
from tests.engine.ranks import thread_ranks
from tests.engine.test_ranks import BASE, QUANTIZED, SMALL, WIDE, asked, asked_with_adapters, assert_same
from tests.quantized_models import quantize_checkpoint
from tests.tiny_models import save_tiny_model

__all__ = ["nodes", "thread_ranks"]
MISSING = Cpu().missing
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
    let_go()


def engine(path: Path | str, **settings: Any) -> Engine:
    return Engine(EngineConfig(model=str(path), **BASE | settings))


def ranks_of(made: Engine) -> SpmdRanks:
    assert isinstance(made.runner, SpmdRunner)
    return made.runner._ranks


@pytest.mark.parametrize(("family", "ranks", "count"), [("llama", 2, 2), ("gemma3", 4, 2), ("qwen3", 4, 4)])
def test_families_say_what_one_process_says(family: str, ranks: int, count: int, nodes: Nodes, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family)
    divided = engine(path, **nodes(str(path), ranks, count), **SMALL)
    found = run(divided, asked())
    assert_same(found, run(engine(path, **SMALL), asked()))
    assert sum(isinstance(each, Remote) for each in ranks_of(divided)._processes) == ranks - ranks // count
    assert "on 127.0.0.1" in divided.info.notes[0]
    for each in asked():
        divided.reset_prefix_cache()
        (alone,) = run(divided, [each]).values()
        assert (alone.ids, alone.logprobs) == (found[each.id].ids, found[each.id].logprobs)


@pytest.mark.parametrize("way", [*QUANTIZED, "int8", "int4", "fp8"])
def test_weights_in_few_bits(way: str, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen without integer products: see test_ranks.py."""
    monkeypatch.setattr(Cpu, "pack_quantized", Reference.pack_quantized)
    monkeypatch.setattr(Cpu, "pack_table", Reference.pack_table)
    path, settings = save_tiny_model(tmp_path / "model", "llama", **WIDE), {}
    if way in QUANTIZED:
        path = quantize_checkpoint(path, tmp_path / "few", *QUANTIZED[way])
    else:
        settings = {"quantization": way}
    assert_same(run(engine(path, **nodes(str(path), 2), **settings), asked()), run(engine(path, **settings), asked()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_bits_by_integers_and_bfloat16_do_not_depend_on_the_batch(dtype: str, nodes: Nodes) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "quantization": "int4", "max_model_len": 128, "num_kv_blocks": 64}
    divided = engine(DEMO_MODEL, **settings, **nodes(DEMO_MODEL, 2))
    found = run(divided, asked())
    for each in asked():
        divided.reset_prefix_cache()
        (alone,) = run(divided, [each]).values()
        assert (alone.ids, alone.logprobs) == (found[each.id].ids, found[each.id].logprobs)


def test_adapters_come_with_the_orders(nodes: Nodes, tmp_path: Path) -> None:
    """Two slots for three of them: one comes back, without its files being sent again."""
    path, requests = asked_with_adapters(tmp_path)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64}
    divided = engine(path, **lora, **nodes(str(path), 2))
    expected = run(engine(path, **lora), requests)
    assert_same(run(divided, requests), expected)
    divided.reset_prefix_cache()
    assert_same(run(divided, requests), expected)
    assert len(ranks_of(divided)._sent) == 3


def test_an_adapter_that_cannot_be_read_ends_its_own_requests_alone(nodes: Nodes, tmp_path: Path) -> None:
    path, requests = asked_with_adapters(tmp_path)
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64}
    divided, alone = engine(path, **lora, **nodes(str(path), 2)), engine(path, **lora)
    for folder in {each.adapter.folder for each in requests if each.adapter is not None}:
        shutil.rmtree(folder)
    found, expected = run(divided, requests), run(alone, requests)
    reasons = {key: each.finish_reason for key, each in found.items()}
    assert reasons == {key: each.finish_reason for key, each in expected.items()}
    assert len(set(reasons.values())) == 2
    assert not ranks_of(divided)._sent


def test_a_machine_with_other_weights_is_refused(nodes: Nodes, tmp_path: Path) -> None:
    here, there = save_tiny_model(tmp_path / "here", "llama"), tmp_path / "there"
    shutil.copytree(here, there)
    content = bytearray((there / "model.safetensors").read_bytes())
    content[-1000:] = b"\0" * 1000
    (there / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model: the machine at 127\.0\.0\.1 has other weights than machine 0"):
        engine(here, **nodes(str(there), 2))


def test_each_machine_has_a_path_and_an_engine_after_another(nodes: Nodes, tmp_path: Path) -> None:
    here, there = save_tiny_model(tmp_path / "here", "llama"), tmp_path / "there"
    there.symlink_to(here)
    told = nodes(str(there), 2)
    expected = run(engine(here), asked())
    for _ in range(2):
        assert_same(run(engine(here, **told), asked()), expected)
        let_go()


def test_the_machine_with_the_least_room_decides(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path, "llama")
    monkeypatch.setattr("quire.engine.worker.ranks.rank.available_bytes", lambda *_: 300_000)
    made = engine(path, **nodes(str(path), 4), max_model_len=64)
    each = sum(tensor.nbytes for layer in made.runner._model.pages(1) for tensor in layer)
    assert made.info.num_blocks == 300_000 // (2 * each)
    given = engine(path, **nodes(str(path), 2), max_model_len=64, kv_cache_memory=0.01)
    assert given.info.num_blocks > made.info.num_blocks


def test_a_machine_that_goes_ends_the_engine(nodes: Nodes, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    made = engine(path, **nodes(str(path), 2))
    for each in asked():
        made.add(each)
    made.step()
    (remote,) = ranks_of(made)._processes
    remote.kill()
    with pytest.raises(EngineError, match=r"rank 1 of 2 .process .* on 127.0.0.1. is out of reach"):
        run(made, [])


def connect(config: EngineConfig) -> socket.socket:
    return socket.create_connection((config.master_addr, config.master_port), 30)


def test_garbage_and_half_open_connections_keep_nobody_out(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(NODE_SECRET, "s3cret")
    settings = told()
    _, thread, found = gathering(settings)
    config, rng, idle = member_config(settings), random.Random(1), []
    for size in (0, 1, 40, 5000):
        with connect(config) as one:
            one.recv(64)
            one.sendall(rng.randbytes(size))
    with connect(config) as one:
        one.sendall(b"\xff" * 40)  # a greeting of four gigabytes
    for _ in range(12):
        idle.append(connect(config))
    with connect(config) as own:
        introduce(own, b"s3cret", join_of(config, 1, 0, 77))
        thread.join(30)
        assert [each.pid for each in found] == [77]
    for one in idle:
        one.close()
    assert capfd.readouterr().err.count("is not from a machine that can join") > 0


def test_more_connections_than_are_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond are closed at once, and who wants to join comes again."""
    monkeypatch.setattr("quire.engine.nodes.greeting.GREETING_SECONDS", 1.0)
    settings = told()
    _, thread, found = gathering(settings)
    config = member_config(settings)
    idle = [connect(config) for _ in range(80)]
    while thread.is_alive():
        with connect(config) as own:
            try:
                introduce(own, b"", join_of(config, 1, 0, 78))
            except (OSError, ValueError):
                continue
            thread.join(30)
    assert [each.pid for each in found] == [78]
    for one in idle:
        one.close()


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"tensor_parallel_size": 4}, "tensor_parallel_size is 2 on machine 0 and 4 there"),
        ({"tensor_parallel_size": 3, "nnodes": 3}, "nnodes is 2 on machine 0 and 3 there; tensor_parallel_size is 2"),
        ({"model": "other"}, "model: another config.json"),
    ],
)
def test_who_would_compute_something_else_is_refused(changed: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    settings = told()
    _, thread, found = gathering(settings)
    if "model" in changed:
        changed = {"model": str(save_tiny_model(tmp_path, "llama"))}
    other = EngineConfig(**{"model": DEMO_MODEL} | settings | {"node_rank": 1} | changed)
    with connect(other) as one, pytest.raises(Refused, match=wrong):
        introduce(one, b"", join_of(other, 1, 0, 5))
    config = member_config(settings)
    for node, place in ((0, 0), (1, 1), (1, -1)):
        with connect(config) as one, pytest.raises(Refused, match="there is no rank"):
            introduce(one, b"", join_of(config, node, place, 5))
    with connect(config) as one:
        introduce(one, b"", join_of(config, 1, 0, 6))
        thread.join(30)
    assert [each.pid for each in found] == [6]


def test_who_does_not_know_the_secret_neither_joins_nor_gives_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_SECRET, "s3cret")
    settings = told()
    _, thread, found = gathering(settings)
    config = member_config(settings)
    for secret in (b"", b"another"):
        with connect(config) as one, pytest.raises(Refused, match=f"another {NODE_SECRET}"):
            introduce(one, secret, join_of(config, 1, 0, 5))
    assert not found
    with connect(config) as one:
        introduce(one, b"s3cret", join_of(config, 1, 0, 6))
        thread.join(30)
    assert [each.pid for each in found] == [6]


def test_who_says_anything_learns_nothing_of_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seal of something known would tell whether a guess is right."""
    monkeypatch.setenv(NODE_SECRET, "s3cret")
    settings = told()
    made, thread, _ = gathering(settings)
    config = member_config(settings)
    with connect(config) as one:
        one.settimeout(30)
        nonce = one.recv(64)[-32:]
        one.sendall((4).to_bytes(4, "little") + bytes(32) + b"\x83abc")
        with one.makefile("rb") as said:
            length = int.from_bytes(said.read(4), "little")
            seal, body = said.read(32), said.read(length)
    known = b"", nonce, bytes(32)
    assert seal not in {hmac.digest(b"s3cret", each + body, "sha256") for each in known}
    for size in range(5000, 5300):
        with connect(config) as one:
            one.recv(64)
            one.sendall(size.to_bytes(4, "little"))
            one.recv(64)
    assert len(made._said) < 8, "each text once, and strangers cannot make up more"
    with connect(config) as one:
        introduce(one, b"s3cret", join_of(config, 1, 0, 5))
        thread.join(30)


@pytest.mark.parametrize("joined", [False, True])
def test_who_does_not_know_the_secret_ends_no_machine_that_had_joined(
    joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no engine gathers machines, anybody may listen where machine 0 did."""
    monkeypatch.setattr("quire.engine.nodes.member._AGAIN_SECONDS", 0.05)
    settings = told()
    member, asked = ThreadMember(member_config(settings)), 0
    member._joined = joined
    with socket.create_server(("127.0.0.1", settings["master_port"])) as listener:
        thread = threading.Thread(target=member.keep, args=(0,), daemon=True)
        thread.start()
        listener.settimeout(30)
        while asked < (3 if joined else 1):
            with listener.accept()[0] as one:
                one.sendall(b"quire nodes 1\n" + bytes(32))
                one.recv(4096)
                one.sendall(bytes(4 + 32))
            asked += 1
        member.ending.set() if joined else thread.join(30)
    thread.join(30)
    assert not thread.is_alive()
    assert (member.failure is None) == joined


@pytest.mark.parametrize("length", [2**40, 2**62, 2**64 - 1])
def test_an_answer_of_any_length_ends_its_rank_alone(length: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours, theirs = socket.create_connection(listener.getsockname()), listener.accept()[0]
    remote = Remote(ours, join_of(member_config(told()), 1, 0, 5))
    theirs.sendall(length.to_bytes(8, "little") + b"x")
    theirs.close()
    assert remote.get() is None
    assert remote.wait(30) == -signal.SIGKILL


def test_one_place_is_taken_once_until_it_is_free_again() -> None:
    settings = told() | {"tensor_parallel_size": 4}
    _, thread, found = gathering(settings)
    config = member_config(settings)
    with connect(config) as gone:
        introduce(gone, b"", join_of(config, 1, 0, 5))
        with connect(config) as one, pytest.raises(ValueError, match="machine 1 has joined already"):
            introduce(one, b"", join_of(config, 1, 0, 6))
    joined = False
    while not joined:  # until it is noticed that the first has gone
        with connect(config) as again, suppress(ValueError):
            introduce(again, b"", join_of(config, 1, 0, 7))
            joined = True
            with connect(config) as second:
                introduce(second, b"", join_of(config, 1, 1, 8))
                thread.join(30)
    assert [each.pid for each in found] == [7, 8]


def test_who_never_comes_ends_the_start() -> None:
    settings = told() | {"nodes_timeout": 0.3}
    with pytest.raises(ConfigError, match=r"nnodes: machine 1 of 2 has not joined 127.0.0.1:\d+ in 0.3 s") as found:
        engine(DEMO_MODEL, **settings)
    assert found.value.param == "nnodes"


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"nnodes": 2}, "nnodes: tensor_parallel_size 1 cannot be divided evenly among 2 machines"),
        ({"nnodes": 2, "tensor_parallel_size": 3}, "nnodes: tensor_parallel_size 3 cannot be divided evenly"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_rank": 2}, "node_rank: machine 2 is none of the 2 of nnodes"),
        ({"node_rank": 1}, "node_rank: machine 1 is none of the 1 of nnodes"),
        ({"nnodes": 2, "pipeline_parallel_size": 2}, "nnodes: .* pipeline_parallel_size"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "nnodes: .* data_parallel_size"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "0.0.0.0"}, "master_addr: 0.0.0.0 is no address"),
    ],
)
def test_what_cannot_be_on_several_machines(settings: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        EngineConfig(**settings)


def test_addresses_that_are_not_this_machines() -> None:
    with pytest.raises(ConfigError, match=r"master_addr, master_port: cannot listen on 192\.0\.2\.1:"):
        engine(DEMO_MODEL, **told() | {"master_addr": "192.0.2.1"})
    with pytest.raises(ConfigError, match=r"master_addr: .no\.such\.host\.invalid. is no address"):
        engine(DEMO_MODEL, **told() | {"master_addr": "no.such.host.invalid"})
    with pytest.raises(ConfigError, match="node_rank: machines but the first"):
        engine(DEMO_MODEL, **told() | {"node_rank": 1})
