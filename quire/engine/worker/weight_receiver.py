"""Process that receives weights from a torch.distributed group and writes them to files.

    python -m quire.engine.worker.weight_receiver FD FOLDER

A collective may wait for a dead peer, which must not stop the engine. FD is a socket of
engine/client/weight_broadcast.py for calls of WeightReceiverMethods. When the socket closes, FOLDER is deleted and the
process exits at once.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from quire.engine.checkpoint.tensor_headers import INDEX_FILE
from quire.engine.common.errors import InvalidRequest
from quire.engine.common.weight_receiver import WeightReceiverMethods
from quire.engine.processes.frames import encode_frame, read_frame
from quire.engine.processes.utility_calls import Fault, UtilityResult, decode_call, invoke, make_result

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightFileReceiver(WeightReceiverMethods):
    """Receives broadcasts from rank 0."""

    def __init__(self) -> None:
        self._shard_of_tensor: dict[str, dict[str, str]] = {}
        self._device = torch.device("cpu")

    def join(self, address: str, port: int, rank: int, world_size: int, backend: str, timeout: float) -> None:
        self.leave()
        if backend == "nccl":
            self._device = torch.device("cuda")
        dist.init_process_group(
            backend,
            init_method=f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def receive(self, folder: str, tensors: list[tuple[str, str, list[int]]]) -> None:
        received = {}
        try:
            for name, dtype, shape in tensors:
                tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=self._device)
                dist.broadcast(tensor, src=0)
                received[name] = tensor.cpu()
        except Exception:
            self.leave()
            raise
        shards = self._shard_of_tensor.setdefault(folder, {})
        shard = f"model-{len(set(shards.values())) + 1:05}.safetensors"
        Path(folder).mkdir(exist_ok=True)
        save_file(received, Path(folder) / shard)
        shards |= dict.fromkeys(received, shard)

    def finish(self, folder: str) -> None:
        (Path(folder) / INDEX_FILE).write_text(json.dumps({"weight_map": self._shard_of_tensor.pop(folder)}))
        self._shard_of_tensor.clear()


def main() -> None:
    connection, root = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    calls: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_read_calls_then_exit, args=(connection, root, calls), daemon=True).start()
    receiver = WeightFileReceiver()
    while True:
        call = decode_call(calls.get())
        assert call.id is not None
        try:
            result = make_result(call.id, invoke(WeightReceiverMethods, receiver, call))
        except Exception as error:
            message = str(error).partition("\n")[0] or type(error).__name__
            result = UtilityResult(call.id, error=Fault.of(InvalidRequest(f"the process group failed: {message}")))
        connection.sendall(encode_frame(result))


def _read_calls_then_exit(connection: socket.socket, root: str, calls: SimpleQueue[bytes]) -> None:
    with connection.makefile("rb") as pipe:
        while (content := read_frame(pipe)) is not None:
            calls.put(content)
    shutil.rmtree(root, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
