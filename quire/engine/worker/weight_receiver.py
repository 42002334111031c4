"""A process that receives weights over a torch.distributed group, and writes them to files that an engine can read.

    python -m quire.engine.worker.weight_receiver FD FOLDER

It is not the engine's, because a collective waits for a peer that may have died, and an engine may not. FD is a socket
of engine/link/broadcast.py; each line there is one command in JSON, and is answered by one line: {} or {"error": …}.
When the socket is closed, FOLDER goes with all that is in it, and the process ends, wherever it is.
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
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from quire.engine.checkpoint.tensor_headers import INDEX_FILE

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightFileReceiver:
    """Takes part in a group's broadcasts from rank 0."""

    def __init__(self) -> None:
        self._shard_of_tensor: dict[str, dict[str, str]] = {}
        """By folder the file of each tensor that was received."""
        self._device = torch.device("cpu")

    def join(self, *, address: str, port: int, rank: int, world_size: int, backend: str, timeout: float) -> None:
        """Returns when all members have come. Raises RuntimeError when some do not within `timeout` seconds."""
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

    def receive(self, *, folder: str, tensors: list[tuple[str, str, list[int]]]) -> None:
        """Write the next tensors that rank 0 broadcasts, by name, type and shape, to one more file in the folder.

        Raises RuntimeError where the group breaks, which it then is.
        """
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

    def finish(self, *, folder: str) -> None:
        """Name all that was received in the folder's index."""
        (Path(folder) / INDEX_FILE).write_text(json.dumps({"weight_map": self._shard_of_tensor.pop(folder)}))
        self._shard_of_tensor.clear()


def main() -> None:
    connection, root = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    commands: SimpleQueue[dict[str, Any]] = SimpleQueue()
    Thread(target=_read_commands_then_exit, args=(connection, root, commands), daemon=True).start()
    receiver = WeightFileReceiver()
    while True:
        command = commands.get()
        answer = {}
        try:
            getattr(receiver, command.pop("do"))(**command)
        except Exception as error:
            answer["error"] = str(error).partition("\n")[0] or type(error).__name__
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _read_commands_then_exit(connection: socket.socket, root: str, commands: SimpleQueue[dict[str, Any]]) -> None:
    with connection.makefile("rb") as lines:
        for line in lines:
            commands.put(json.loads(line))
    shutil.rmtree(root, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()
