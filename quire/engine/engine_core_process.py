"""Serves an engine core to the parent process over a socket."""

from __future__ import annotations

import gc
from typing import NamedTuple

import zmq

from quire.engine.checkpoint.kv_offload_dir import delete_kv_blocks
from quire.engine.client.messages import (
    Abort,
    EngineCoreMethods,
    EngineStarted,
    FromEngine,
    Stepped,
    Submit,
    attach_images,
    decode_to_engine,
)
from quire.engine.common.config import EngineConfig, capacity_settings_from_info
from quire.engine.common.errors import QuireError
from quire.engine.core.stats import BlockTableView, EngineView
from quire.engine.engine_core import EngineCore, free_engine_memory
from quire.engine.processes.heartbeat import Heartbeat
from quire.engine.processes.utility_calls import (
    START,
    Fault,
    UtilityCall,
    UtilityResult,
    decode_arguments,
    encode,
    make_result,
    run_call,
)

_ERROR_LINGER_MS = 30_000
"""Maximum wait until the error is sent to the parent, whose imports are slow."""


class EngineChange(NamedTuple):
    call_id: int
    config: EngineConfig | None
    """None if the engine shall sleep."""


class EngineLetGo(Exception):
    def __init__(self, config: EngineConfig | None) -> None:
        super().__init__()
        self.config = config


class EngineUtilities(EngineCoreMethods):
    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine

    def take_snapshot(self) -> EngineView:
        return self._engine.make_engine_view()

    def get_block_table(self, request_id: str) -> BlockTableView | None:
        return self._engine.get_block_table(request_id)

    def reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    def run_collective_rpc(self, content: bytes) -> list[bytes]:
        return self._engine.run_collective_rpc(content)

    def check_weights(self, config: str) -> None:
        self._engine.check_replacement_weights(EngineConfig.model_validate_json(config))

    def load_weights(self, config: str) -> EngineStarted:
        self.check_weights(config)
        raise EngineLetGo(EngineConfig.model_validate_json(config))

    def sleep(self) -> None:
        raise EngineLetGo(None)


def run_engine_core(config: EngineConfig, address: str, heartbeat: Heartbeat) -> int:
    """If the engine cannot start, or fails later, return 1."""
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 1000)
    socket.connect(address)
    try:
        engine, failure = EngineCore(config, heartbeat), None
        call_id = START
        # A rebuilt engine keeps the context length and the number of KV blocks.
        config = config.model_copy(update=capacity_settings_from_info(engine.info))
        while True:
            _send_message(socket, make_result(call_id, EngineStarted(engine.info, failure)))
            engine.executor.preload_grammar_compiler()
            gc.freeze()
            call_id, wanted = _run_until_change(engine, socket)
            engine.shut_down()
            del engine
            gc.unfreeze()
            free_engine_memory()
            if wanted is None:
                _send_message(socket, make_result(call_id, None))
                (call_id, config, engine), failure = _sleep_then_build_engine(config, socket, heartbeat), None
            else:
                config, engine, failure = _rebuild_engine_or_previous(config, wanted, heartbeat)
    except QuireError as error:
        _send_message(socket, UtilityResult(START, error=Fault.of(error)))
        socket.close(linger=_ERROR_LINGER_MS)
        context.term()  # waits until the error is sent; the end of the process would not wait
        return 1


def _run_until_change(engine: EngineCore, socket: zmq.Socket[bytes]) -> EngineChange:
    while True:
        if (change := _handle_messages_and_get_change(engine, socket)) is not None:
            return change
        outputs = engine.step()
        if outputs or engine.last_step_record is not None:
            _send_message(socket, Stepped(outputs, engine.engine_stats, engine.last_step_record))


def _handle_messages_and_get_change(engine: EngineCore, socket: zmq.Socket[bytes]) -> EngineChange | None:
    is_idle = not engine.has_work
    while is_idle or socket.poll(0):
        if is_idle and not socket.poll(0) and engine.run_next_warmup():
            continue
        match decode_to_engine(socket.recv()):
            case Submit(requests, images):
                is_idle = False
                for request in attach_images(requests, images) if images else requests:
                    engine.add_request(request)
            case Abort(ids):
                is_idle = False
                for request_id in ids:
                    engine.abort_request(request_id)
            case UtilityCall() as call:  # a utility call does not end the idle state
                if (change := _run_call_or_get_change(engine, socket, call)) is not None:
                    return change
    return None


def _run_call_or_get_change(engine: EngineCore, socket: zmq.Socket[bytes], call: UtilityCall) -> EngineChange | None:
    try:
        result = run_call(EngineCoreMethods, EngineUtilities(engine), call)
    except EngineLetGo as change:
        assert call.id is not None
        return EngineChange(call.id, change.config)
    if result is not None:
        _send_message(socket, result)
    return None


def _sleep_then_build_engine(
    config: EngineConfig, socket: zmq.Socket[bytes], heartbeat: Heartbeat
) -> tuple[int, EngineConfig, EngineCore]:
    while True:
        call = decode_to_engine(socket.recv())
        if not isinstance(call, UtilityCall):  # ignored, because it was sent before the sleep began
            continue
        if call.method == EngineCoreMethods.reset_prefix_cache.__name__ and config.kv_offload_dir is not None:
            delete_kv_blocks(config.kv_offload_dir)
        if call.method == EngineCoreMethods.load_weights.__name__:
            assert call.id is not None
            config = EngineConfig.model_validate_json(decode_arguments(EngineCoreMethods, call)["config"])
            try:
                return call.id, config, EngineCore(config, heartbeat)
            except QuireError as error:
                refused = UtilityResult(call.id, error=Fault.of(error))
            free_engine_memory()
            _send_message(socket, refused)


def _rebuild_engine_or_previous(
    previous: EngineConfig, config: EngineConfig, heartbeat: Heartbeat
) -> tuple[EngineConfig, EngineCore, str | None]:
    """The old engine must have been released."""
    try:
        return config, EngineCore(config, heartbeat), None
    except QuireError as error:
        failure = error.message
    free_engine_memory()
    return previous, EngineCore(previous, heartbeat), failure


def _send_message(socket: zmq.Socket[bytes], message: FromEngine) -> None:
    socket.send(encode(message))
