"""The engine process: an engine core that its parent asks over a socket."""

from __future__ import annotations

import gc

import zmq

from quire.engine.checkpoint.kv_offload_dir import delete_kv_blocks
from quire.engine.common.config import EngineConfig, capacity_settings_from_info
from quire.engine.common.errors import InvalidRequest, QuireError
from quire.engine.engine_core import EngineCore, free_engine_memory
from quire.engine.link.engine_messages import (
    Abort,
    Asleep,
    Call,
    Called,
    Check,
    Checked,
    Failed,
    FromEngine,
    Load,
    Ready,
    Refused,
    ResetPrefixCache,
    Sleep,
    SnapshotRequest,
    SnapshotTaken,
    Stepped,
    Submit,
    decode_to_engine,
    encode,
    together,
)
from quire.engine.processes.heartbeat import Heartbeat

_ERROR_LINGER_MS = 30_000
"""For which a process that cannot start waits until its parent, which has much to import, listens to why."""


def run_engine_core(config: EngineConfig, address: str, heartbeat: Heartbeat) -> int:
    """Serve the parent over the socket at `address`, until the process ends with the parent. Returns only where the
    engine cannot start."""
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 1000)
    socket.connect(address)
    try:
        engine, failure = EngineCore(config, heartbeat), None
        # One that is built anew has the same context and pages, whatever memory is free then.
        config = config.model_copy(update=capacity_settings_from_info(engine.info))
        while True:
            _send_message(socket, Ready(engine.info, failure))
            engine.executor.preload_grammar_compiler()
            gc.freeze()  # exempts what lives as long as the engine from garbage collection
            change = _run_until_change(engine, socket)
            engine.shut_down()
            del engine
            gc.unfreeze()
            free_engine_memory()
            if isinstance(change, Sleep):
                _send_message(socket, Asleep())
                (config, engine), failure = _sleep_then_build_engine(config, socket, heartbeat), None
            else:
                config, engine, failure = _rebuild_engine_or_previous(config, change, heartbeat)
    except QuireError as error:
        _send_message(socket, Failed(error.message, error.param))
        socket.close(linger=_ERROR_LINGER_MS)
        context.term()  # waits for that; the end of the process alone would not
        return 1


def _run_until_change(engine: EngineCore, socket: zmq.Socket[bytes]) -> Sleep | EngineConfig:
    """Compute until the engine is to be let go: to sleep, or for one of another configuration."""
    while True:
        if (change := _handle_messages_and_get_change(engine, socket)) is not None:
            return change
        outputs = engine.step()
        if outputs or engine.last_step_record is not None:
            _send_message(socket, Stepped(outputs, engine.engine_stats, engine.last_step_record))


def _handle_messages_and_get_change(engine: EngineCore, socket: zmq.Socket[bytes]) -> Sleep | EngineConfig | None:  # noqa: PLR0912 (one case per message)
    """Handle all messages that have arrived. With nothing to compute, warm up, or wait for a message. Returns what the
    engine is to be let go for."""
    is_idle = not engine.has_work
    while is_idle or socket.poll(0):
        if is_idle and not socket.poll(0) and engine.run_next_warmup():
            continue
        match decode_to_engine(socket.recv()):
            case Submit(requests, images):
                is_idle = False
                for request in together(requests, images):
                    engine.add_request(request)
            case Abort(ids):
                is_idle = False
                for request_id in ids:
                    engine.abort_request(request_id)
            case Sleep() as sleep:
                return sleep
            case Load(text):
                if (config := _parse_config_or_refuse(engine, socket, text)) is not None:
                    return config
            case Check(text):
                if _parse_config_or_refuse(engine, socket, text) is not None:
                    _send_message(socket, Checked())
            case (SnapshotRequest() | ResetPrefixCache() | Call()) as utility_call:
                _run_utility_call(engine, socket, utility_call)
    return None


def _run_utility_call(
    engine: EngineCore, socket: zmq.Socket[bytes], utility_call: SnapshotRequest | ResetPrefixCache | Call
) -> None:
    """Run a call that leaves the engine idle if it was."""
    match utility_call:
        case SnapshotRequest():
            _send_message(socket, SnapshotTaken(engine.make_engine_view()))
        case ResetPrefixCache():
            engine.reset_prefix_cache()
        case Call(content):
            try:
                _send_message(socket, Called(engine.run_collective_rpc(content)))
            except InvalidRequest as error:
                _send_message(socket, Called([], error.message))


def _parse_config_or_refuse(engine: EngineCore, socket: zmq.Socket[bytes], text: str) -> EngineConfig | None:
    """The configuration in `text` if an engine could load its weights; else tell the parent why not."""
    config = EngineConfig.model_validate_json(text)
    try:
        engine.check_replacement_weights(config)
    except QuireError as error:
        _send_message(socket, Refused(error.message, error.param))
        return None
    return config


def _sleep_then_build_engine(
    config: EngineConfig, socket: zmq.Socket[bytes], heartbeat: Heartbeat
) -> tuple[EngineConfig, EngineCore]:
    """Wait without an engine until there is one again."""
    while True:
        message = decode_to_engine(socket.recv())
        if isinstance(message, ResetPrefixCache) and config.kv_offload_dir is not None:
            delete_kv_blocks(config.kv_offload_dir)
        if isinstance(message, Load):  # others are of before the sleep
            config = EngineConfig.model_validate_json(message.config)
            try:
                return config, EngineCore(config, heartbeat)
            except QuireError as error:
                refused = Refused(error.message, error.param)
            free_engine_memory()
            _send_message(socket, refused)


def _rebuild_engine_or_previous(
    previous: EngineConfig, config: EngineConfig, heartbeat: Heartbeat
) -> tuple[EngineConfig, EngineCore, str | None]:
    """An engine of `config`, or where it cannot start one of `previous`, and why; with its configuration. The engine
    before must have been let go. Raises ConfigError where neither can start."""
    try:
        return config, EngineCore(config, heartbeat), None
    except QuireError as error:
        failure = error.message
    free_engine_memory()
    return previous, EngineCore(previous, heartbeat), failure


def _send_message(socket: zmq.Socket[bytes], message: FromEngine) -> None:
    socket.send(encode(message))
