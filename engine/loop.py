"""The engine: its whole life on one screen, and the process it lives in.

The only module that sees both halves, the torch-free control half and the worker; so it is imported only where an
engine starts.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import torch
import zmq

from engine.config import EngineConfig
from engine.errors import ConfigError, QuireError
from engine.model_files import ModelConfig, read_model_config, resolve_model
from engine.models import decoder_spec
from engine.models.decoder import Decoder
from engine.plan import plan_kv
from engine.scheduler import Scheduler
from engine.types import EngineInfo, EngineOutputs, EngineStats, Request, RequestOutput
from engine.wire import Abort, Failed, FromEngine, Ready, Stepped, Stop, Submit, decode_to_engine, encode
from engine.worker.inputs import Slots
from engine.worker.loader import dummy_stream, load_weights, safetensors_stream
from engine.worker.memory import allocate_kv_cache, kv_budget
from engine.worker.runner import Runner
from kernels.attention import select_backend


class Engine:
    """A model, its KV cache and a scheduler. Raises ConfigError for a configuration it cannot start with."""

    def __init__(self, config: EngineConfig) -> None:
        began = time.perf_counter()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        path = resolve_model(config.model, config.revision)
        model_config = read_model_config(path)
        device = _device(config)
        dtype = _dtype(config, model_config, device)
        dtype_name = str(dtype).removeprefix("torch.")
        try:
            backend, why = select_backend(device, config.attention_backend)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"attention_backend: {error}", param="attention_backend") from error
        spec = decoder_spec(model_config)
        # Longer rope tables than the context will need: its length is known only once the weights are loaded.
        length = config.max_model_len or model_config.max_position
        model = Decoder(spec, backend, device=device, max_model_len=length)
        table = model.parameters()
        stream = dummy_stream(table, config.seed, dtype) if config.load_format == "dummy" else safetensors_stream(path)
        with torch.inference_mode():
            weight_bytes = load_weights(table, stream, dtype=dtype, device=device)
        plan = plan_kv(
            model_config,
            dtype=dtype_name,
            block_size=backend.BLOCK_SIZE,
            available_bytes=kv_budget(config, device),
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            num_blocks=config.num_kv_blocks,
        )
        kv_cache = allocate_kv_cache(spec, backend, plan.num_blocks, dtype=dtype, device=device)
        slots = Slots(config.max_num_seqs, plan.max_model_len, backend.BLOCK_SIZE, device)
        self._runner = Runner(model, kv_cache, slots, model_config.eos_token_ids)
        self.scheduler = Scheduler(
            num_blocks=plan.num_blocks,
            block_size=backend.BLOCK_SIZE,
            max_model_len=plan.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            eos_token_ids=model_config.eos_token_ids,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.info = EngineInfo(
            model=config.model,
            dtype=dtype_name,
            device=str(device),
            backend=f"{backend.NAME} ({why})",
            max_model_len=plan.max_model_len,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            kv_bytes=plan.kv_bytes,
            weight_bytes=weight_bytes,
            load_seconds=time.perf_counter() - began,
            arithmetic=plan.arithmetic,
        )

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def step(self) -> list[RequestOutput]:
        """Decide, act, learn: one batch, if there is one; what came of it, and of adds and aborts."""
        batch = self.scheduler.schedule()
        if batch is not None:
            self.scheduler.apply(batch, self._runner.execute(batch))
        elif not self.scheduler.busy:
            self.scheduler.pool.audit()
        return self.scheduler.take_outputs()


def serve(config: EngineConfig, address: str) -> int:
    """The engine process: talk over the socket at `address` until told to stop. Returns the exit code."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 1000)
    socket.connect(address)
    try:
        engine = Engine(config)
    except QuireError as error:
        _send(socket, Failed(error.message, error.param))
        return 1
    _send(socket, Ready(engine.info))
    running = True
    while running:
        running = _receive(engine, socket)
        outputs = engine.step()
        if outputs:
            _send(socket, Stepped(EngineOutputs(outputs, engine.stats)))
    return 0


def _receive(engine: Engine, socket: zmq.Socket[bytes]) -> bool:
    """Take in all messages that are there, waiting for one only if there is nothing to compute. False: stop."""
    wait = not engine.busy
    while wait or socket.poll(0):
        wait = False
        match decode_to_engine(socket.recv()):
            case Submit(requests):
                for request in requests:
                    engine.add(request)
            case Abort(ids):
                for request_id in ids:
                    engine.abort(request_id)
            case Stop():
                return False
    return True


def _send(socket: zmq.Socket[bytes], message: FromEngine) -> None:
    socket.send(encode(message))


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch finds no NVIDIA GPU", param="device")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _dtype(config: EngineConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """The type asked for, or the checkpoint's; CPUs compute float16 poorly, so there auto makes it bfloat16."""
    name = config.dtype if config.dtype != "auto" else model.dtype
    if config.dtype == "auto" and (name == "float16" and device.type == "cpu"):
        name = "bfloat16"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ConfigError(
            f"dtype: the checkpoint's {name!r} is not supported; choose one of {', '.join(dtypes)}", param="dtype"
        )
    return dtypes[name]


def _first_line() -> bytes:
    """Of standard input, and not a byte more: what follows is the watcher's."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def _end_with_parent() -> None:
    """The parent holds the other end of our standard input: when that closes, it is gone, and so are we."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> None:
    """`python -m engine.loop ADDRESS`, the configuration as one line of JSON on standard input."""
    config = EngineConfig.model_validate_json(_first_line())
    _end_with_parent()
    sys.exit(serve(config, sys.argv[1]))


if __name__ == "__main__":
    main()
