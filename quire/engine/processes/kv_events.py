"""vLLM's KV events, which tell external routers what an engine has cached (--kv-events-config). A message has three
frames: topic, batch number (8 bytes, big-endian) and a KVEventBatch as msgpack. Dropped batches leave gaps in the
numbers. To get earlier batches, a subscriber sends an empty frame and the first number (8 bytes) to the replay
endpoint. It gets one message per batch, then a message with number -1.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

import msgspec
import zmq

from quire.engine.common import clock
from quire.engine.common.config_types import KVEventsConfig
from quire.engine.common.errors import ConfigError

log = logging.getLogger("quire.engine")
ENGINE_MEDIUM = "GPU"
"""vLLM's word for the engine's own cache, on any device."""
_END = (-1).to_bytes(8, "big", signed=True)
_REPLAY_FRAMES = 3
_STOP_SECONDS = 1.0
_LINGER_MS = 200


class KVCacheEvent(msgspec.Struct, tag=True, omit_defaults=True):
    """A struct whose field `type` is the class's name."""


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the preceding block; None at a prompt's beginning."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None
    """None means the first KV cache group."""


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, omit_defaults=True):
    ts: float
    """Unix time in seconds."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KVEventPublisher:
    """Sends batches from a thread. Batches are dropped while `max_queue_size` batches wait for the thread, or `hwm` for
    a subscriber. The constructor raises ConfigError for unusable endpoints.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._config = config
        self._encode = msgspec.msgpack.Encoder().encode
        self._numbers = count()
        self._has_dropped = False
        self._context = zmq.Context()
        queue = f"inproc://kv-events-{id(self)}"
        self._queue, receiver = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._queue.set(zmq.SNDHWM, config.max_queue_size)
        receiver.set(zmq.RCVHWM, 1)
        receiver.bind(queue)
        self._queue.connect(queue)
        try:
            publisher = self._open_socket(zmq.PUB, config.endpoint, "endpoint")
            publisher.set(zmq.SNDHWM, config.hwm)
            replay = None
            if config.replay_endpoint is not None:
                replay = self._open_socket(zmq.ROUTER, config.replay_endpoint, "replay_endpoint")
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        sockets = receiver, publisher, replay
        self._thread = threading.Thread(target=self._run, args=sockets, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        if not events:
            return
        batch = KVEventBatch(clock.time(), list(events), self._config.data_parallel_rank)
        try:
            self._queue.send_multipart([next(self._numbers).to_bytes(8, "big"), self._encode(batch)], zmq.NOBLOCK)
        except zmq.Again:
            if not self._has_dropped:
                log.warning("kv_events_config: events are dropped: %d batches wait", self._config.max_queue_size)
            self._has_dropped = True

    def close(self) -> None:
        """Sends the waiting batches, then closes."""
        with suppress(zmq.Again):
            self._queue.send_multipart([b""], zmq.NOBLOCK)
        self._thread.join(_STOP_SECONDS)
        self._queue.close(linger=0)
        if not self._thread.is_alive():
            self._context.term()

    def _open_socket(self, kind: int, endpoint: str, name: str) -> zmq.Socket[bytes]:
        """As in vLLM, connects a PUB socket to a tcp:// endpoint without `*` and `::`, and binds all others."""
        socket = self._context.socket(kind)
        try:
            if kind == zmq.PUB and endpoint.startswith("tcp://") and "*" not in endpoint and "::" not in endpoint:
                socket.connect(endpoint)
            else:
                socket.bind(endpoint)
        except zmq.ZMQError as error:
            message = f"kv_events_config: {name} {endpoint} cannot be used: {error.strerror}"
            raise ConfigError(message, param="kv_events_config") from None
        return socket

    def _run(self, receiver: zmq.Socket[bytes], publisher: zmq.Socket[bytes], replay: zmq.Socket[bytes] | None) -> None:
        sent = deque[tuple[bytes, bytes]](maxlen=self._config.buffer_steps)
        topic = self._config.topic.encode()
        poller = zmq.Poller()
        for each in (receiver, replay):
            if each is not None:
                poller.register(each, zmq.POLLIN)
        is_open = True
        while is_open:
            ready = dict(poller.poll())
            if receiver in ready:
                number, *payload = receiver.recv_multipart()
                if payload:
                    publisher.send_multipart([topic, number, *payload])
                    sent.append((number, payload[0]))
                is_open = bool(payload)
            if replay is not None and replay in ready:
                _replay(replay, sent)
        receiver.close(linger=0)
        publisher.close(linger=_LINGER_MS)
        if replay is not None:
            replay.close(linger=_LINGER_MS)


def _replay(socket: zmq.Socket[bytes], sent: Sequence[tuple[bytes, bytes]]) -> None:
    request = socket.recv_multipart()
    if len(request) != _REPLAY_FRAMES or len(request[2]) != len(_END):
        return
    client, _, first = request
    for number, payload in sent:
        if number >= first:
            socket.send_multipart([client, b"", number, payload])
    socket.send_multipart([client, b"", _END, b""])
