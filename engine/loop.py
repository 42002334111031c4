"""The engine: scheduler, executor and steps put together, and the process that runs it.

Only this module imports both halves, the torch-free control half and the worker; so only what starts an engine imports
it.
"""

from __future__ import annotations

import gc
import time

import zmq

from quire.engine.checkpoint.files import read_model_config, resolve_model
from quire.engine.client.heartbeat import Heartbeat, NoHeartbeat
from quire.engine.client.messages import (
    Abort,
    Failed,
    FromEngine,
    Ready,
    SnapshotRequest,
    SnapshotTaken,
    Stepped,
    Submit,
    decode_to_engine,
    encode,
)
from quire.engine.config import EngineConfig
from quire.engine.errors import QuireError
from quire.engine.executor import Executor
from quire.engine.scheduler import Scheduler
from quire.engine.snapshot import take_snapshot
from quire.engine.steps import Steps
from quire.engine.types import EngineInfo, EngineSnapshot, EngineStats, RequestOutput, StepRecord
from quire.engine.worker.startup import start_worker

PREFIX_PIECE = 16
"""The unit, in tokens, in which cached prefixes are matched where pages are larger."""


class Engine:
    """A model, its KV cache and a scheduler. Raises ConfigError for a configuration it cannot start with."""

    def __init__(self, config: EngineConfig, heartbeat: NoHeartbeat | None = None) -> None:
        began = time.perf_counter()
        path = resolve_model(config.model, config.revision)
        model = read_model_config(path)
        heartbeat = heartbeat or NoHeartbeat()
        worker = start_worker(config, path, model, heartbeat.progress)
        plan = worker.plan
        self.runner: Executor = worker.runner
        self.scheduler = Scheduler(
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            max_model_len=plan.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            eos_token_ids=model.eos_token_ids,
            enable_prefix_caching=config.enable_prefix_caching,
            prefix_piece=min(plan.block_size, PREFIX_PIECE),
        )
        self.add, self.abort = self.scheduler.add, self.scheduler.abort
        self._heartbeat = heartbeat
        self._steps = Steps(self.scheduler, self.runner, worker.steps_ahead, heartbeat)
        self.info = EngineInfo(
            model=config.model,
            dtype=worker.dtype,
            device=worker.device,
            backend=worker.backend,
            max_model_len=plan.max_model_len,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            kv_bytes=plan.kv_bytes,
            weight_bytes=worker.weight_bytes,
            load_seconds=time.perf_counter() - began,
            arithmetic=plan.arithmetic,
            deterministic=config.deterministic or worker.device == "cpu",
        )

    @property
    def busy(self) -> bool:
        return self._steps.busy

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def snapshot(self) -> EngineSnapshot:
        return take_snapshot(self.scheduler)

    def prepare(self) -> bool:
        """Do one unit of idle warm-up; False when none is left."""
        self._heartbeat.begin_step([])  # so that a warm-up that hangs is noticed as a step is
        more = self.runner.warm_up()
        self._heartbeat.end_step()
        return more

    @property
    def last_step(self) -> StepRecord | None:
        """The record of the step that the last call of step() learnt from, if it learnt from one."""
        return self._steps.last

    def step(self) -> list[RequestOutput]:
        """Run one step, if there is one. Returns the outputs of it, and of adds and aborts."""
        return self._steps.step()


def serve(config: EngineConfig, address: str, heartbeat: Heartbeat) -> int:
    """Serve the parent over the socket at `address`, until the process ends with the parent. Returns only where the
    engine cannot start."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 1000)
    socket.connect(address)
    try:
        engine = Engine(config, heartbeat)
    except QuireError as error:
        _send(socket, Failed(error.message, error.param))
        return 1
    _send(socket, Ready(engine.info))
    engine.runner.load_grammars()
    gc.freeze()  # exempts the start-up objects, which live as long as the process, from garbage collection
    while True:
        _receive(engine, socket)
        outputs = engine.step()
        if outputs or engine.last_step is not None:
            _send(socket, Stepped(outputs, engine.stats, engine.last_step))


def _receive(engine: Engine, socket: zmq.Socket[bytes]) -> None:
    """Handle all messages that have arrived. With nothing to compute, warm up, or wait for a message."""
    idle = not engine.busy
    while idle or socket.poll(0):
        if idle and not socket.poll(0) and engine.prepare():
            continue
        match decode_to_engine(socket.recv()):
            case Submit(requests):
                idle = False
                for request in requests:
                    engine.add(request)
            case Abort(ids):
                idle = False
                for request_id in ids:
                    engine.abort(request_id)
            case SnapshotRequest():  # leaves the engine idle
                _send(socket, SnapshotTaken(engine.snapshot()))


def _send(socket: zmq.Socket[bytes], message: FromEngine) -> None:
    socket.send(encode(message))
