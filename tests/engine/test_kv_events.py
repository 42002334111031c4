"""KV events: what a router outside, which knows vLLM's messages alone, learns of an engine's prefix cache."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from pydantic import ValidationError

from quire.engine.client.replica_shares import replica_config
from quire.engine.common.config import EngineConfig
from quire.engine.common.errors import ConfigError
from quire.engine.engine_core import EngineCore
from quire.engine.processes.kv_events import AllBlocksCleared, BlockStored, KVEventPublisher
from tests.engine.harness import request, run

WAIT_MS = 20_000
TOPIC = "kv-events"


class Router:
    """Rebuilds the cache's content by messages alone, and predicts how much of a prompt an engine has cached."""

    def __init__(self, endpoint: str, context: zmq.Context[Any]) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self.socket.connect(endpoint)
        self.numbers: list[int] = []
        self.known: set[int] = set()
        self.hash_of: dict[tuple[int | None, tuple[int, ...]], int] = {}
        self.size = 0

    def read(self) -> None:
        """All that has come, after at least one message."""
        assert self.socket.poll(WAIT_MS)
        while self.socket.poll(200):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == TOPIC.encode()
            self.numbers.append(int.from_bytes(number, "big"))
            self.apply_batch(msgspec.msgpack.decode(payload))

    def apply_batch(self, batch: dict[str, Any]) -> None:
        assert batch["ts"] > 1.7e9
        for event in batch["events"]:
            match event["type"]:
                case "BlockStored":
                    assert event.keys() >= {"lora_id", "lora_name", "medium"}, "vLLM writes them always"
                    self.size, parent = event["block_size"], event["parent_block_hash"]
                    assert len(event["token_ids"]) == self.size * len(event["block_hashes"])
                    assert parent is None or parent in self.known
                    for place, block_hash in enumerate(event["block_hashes"]):
                        tokens = tuple(event["token_ids"][place * self.size : (place + 1) * self.size])
                        assert block_hash not in self.known
                        self.hash_of[parent, tokens] = parent = block_hash
                        self.known.add(block_hash)
                case "BlockRemoved":
                    assert self.known >= set(event["block_hashes"])
                    self.known -= set(event["block_hashes"])
                case "AllBlocksCleared":
                    self.known.clear()

    def predict(self, prompt: Sequence[int]) -> int:
        """The last token is always computed."""
        parent, found = None, 0
        while found + self.size <= len(prompt) - 1:
            block_hash = self.hash_of.get((parent, tuple(prompt[found : found + self.size])))
            if block_hash not in self.known:
                break
            parent, found = block_hash, found + self.size
        return found


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def events(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    endpoint = f"ipc://{tmp_path}/events"
    return {"enable_kv_cache_events": True, "endpoint": endpoint, "topic": TOPIC, **settings}


def prompt(family: int, length: int) -> list[int]:
    return [(family * 37 + place * 11) % 200 for place in range(length)]


def test_router_predicts_cached_tokens_from_kv_events(tmp_path: Path, context: zmq.Context[Any]) -> None:
    """With a cache so small that blocks are removed all the time."""
    config = events(tmp_path)
    router = Router(config["endpoint"], context)
    engine = EngineCore(EngineConfig(num_kv_blocks=24, threads=1, kv_events_config=config, max_model_len=256))
    predicted = right = 0
    try:
        while not router.socket.poll(100):  # what is told before it has subscribed is lost
            engine.reset_prefix_cache()
        router.read()
        for turn in range(24):
            asked = prompt(turn % 5, 40 + 13 * (turn % 4)) + prompt(turn, 20)
            foreseen = router.predict(asked) if router.size else None
            (answer,) = run(engine, [request(f"r{turn}", asked, max_tokens=3)]).values()
            if foreseen is not None:
                assert foreseen == answer.cached_tokens
                predicted, right = predicted + 1, right + bool(foreseen)
            router.read()
        assert predicted > 10
        assert right > 3
        engine.reset_prefix_cache()
        router.read()
        assert not router.known
        first = router.numbers[0]
        assert router.numbers == [*range(first, first + len(router.numbers))], "none is missing"
    finally:
        engine.shut_down()


def test_kv_event_batches_are_replayed_from_sequence_number(tmp_path: Path, context: zmq.Context[Any]) -> None:
    config = EngineConfig(kv_events_config=events(tmp_path, replay_endpoint=f"ipc://{tmp_path}/replay", buffer_steps=4))
    assert config.kv_events_config is not None
    publisher = KVEventPublisher(config.kv_events_config)
    for place in range(6):
        publisher.publish([BlockStored([place], None, [1, 2], 2, None, "GPU", None)])
    publisher.publish([])
    asking = context.socket(zmq.DEALER)
    asking.connect(f"ipc://{tmp_path}/replay")
    found: list[int] = []
    while found != [3, 4, 5, -1]:  # until the thread has sent all
        found.clear()
        asking.send_multipart([b"", (3).to_bytes(8, "big")])
        while not found or found[-1] != -1:
            assert asking.poll(WAIT_MS)
            _, number, payload = asking.recv_multipart()
            found.append(int.from_bytes(number, "big", signed=True))
            if payload:
                (event,) = msgspec.msgpack.decode(payload)["events"]
                assert event == {
                    "type": "BlockStored",
                    "block_hashes": [found[-1]],
                    "parent_block_hash": None,
                    "token_ids": [1, 2],
                    "block_size": 2,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                }
    asking.send_multipart([b"", b"nonsense and more"])
    asking.send_multipart([b"", (9).to_bytes(8, "big")])
    assert asking.poll(WAIT_MS)
    assert asking.recv_multipart()[1] == (-1).to_bytes(8, "big", signed=True), "another form is not answered"
    publisher.close()


def test_taken_endpoint_is_rejected_by_name(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        config = EngineConfig(kv_events_config=events(tmp_path, endpoint=f"tcp://*:{port}"))
        assert config.kv_events_config is not None
        wrong = rf"kv_events_config: endpoint tcp://\*:{port} cannot be used: Address already in use"
        with pytest.raises(ConfigError, match=wrong):
            KVEventPublisher(config.kv_events_config)


def test_publisher_without_subscriber_does_not_block(tmp_path: Path) -> None:
    config = EngineConfig(kv_events_config=events(tmp_path, max_queue_size=2, hwm=1))
    assert config.kv_events_config is not None
    publisher = KVEventPublisher(config.kv_events_config)
    for _ in range(10_000):
        publisher.publish([AllBlocksCleared()])
    publisher.close()


def test_replicas_have_separate_endpoints_and_sequence_numbers() -> None:
    settings = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6557"}
    config = EngineConfig(data_parallel_size=3, kv_events_config=settings)
    each = [replica_config(config, index, [set()] * 3).kv_events_config for index in range(3)]
    assert [one and one.endpoint for one in each] == ["tcp://*:5557", "tcp://*:5558", "tcp://*:5559"]
    assert [one and one.replay_endpoint for one in each] == ["tcp://*:6557", "tcp://*:6558", "tcp://*:6559"]
    assert [one and one.data_parallel_rank for one in each] == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"enable_prefix_caching": False}, "kv_events_config: prefix caching is off"),
        ({"kv_offload_memory": 0.1}, "kv_events_config: KV events do not cover KV offload"),
    ],
)
def test_kv_events_are_rejected_with_offload_without_prefix_cache_and_encoders(
    tmp_path: Path, settings: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ConfigError, match=wrong) as raised:
        EngineCore(EngineConfig(num_kv_blocks=8, threads=1, kv_events_config=events(tmp_path), **settings))
    assert raised.value.param == "kv_events_config"


def test_kv_events_config_takes_vllm_fields() -> None:
    written = '{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "t"}'
    config = EngineConfig(kv_events_config=written).kv_events_config
    assert config is not None
    assert config.is_enabled
    assert (config.endpoint, config.buffer_steps, config.hwm) == ("tcp://*:5557", 10_000, 100_000)
    for off in ({}, {"enable_kv_cache_events": True, "publisher": "null"}):
        config = EngineConfig(kv_events_config=off).kv_events_config
        assert config is not None
        assert not config.is_enabled
    for wrong in ({"endpoint": "nowhere"}, {"unknown": 1}, "not json", {"hwm": 0}):
        with pytest.raises(ValidationError, match="kv_events_config"):
            EngineConfig(kv_events_config=wrong)
