"""Sends weights to a running Quire server over a torch.distributed group, as a trainer does after each step.

    python examples/rl/send_weights.py http://127.0.0.1:8000 FOLDER [--version NAME]

sends a folder's weights. In a trainer: `Sender(url)` once, then `send(model.state_dict())` after each step. The
server's open requests continue with the new weights from their next token on.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor


class Sender:
    """Rank 0 of a group of two: this process and the server, which must reach `address`.

    Raises httpx.HTTPStatusError for refused requests. A process has one default group, so this does not work in
    distributed training that has its own.
    """

    def __init__(self, url: str, *, address: str = "127.0.0.1", backend: str = "gloo") -> None:
        self._http = httpx.Client(base_url=url, timeout=None, headers=_key())
        self._pool = ThreadPoolExecutor(1)
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        group = {"master_address": address, "master_port": port, "backend": backend}
        joined = self._pool.submit(self._post, "/init_weights_group", group)  # the server joins during the wait below
        limit = timedelta(minutes=5)
        dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=0, world_size=2, timeout=limit)
        joined.result()

    def send(self, tensors: Mapping[str, Tensor], version: str | None = None, bucket_bytes: int = 2**28) -> str:
        """`tensors`: all of the model, by the checkpoint's names. Returns their version."""
        state: dict[str, Any] = {}
        buckets = list(_buckets(tensors, bucket_bytes))
        for bucket in buckets:
            described = [
                {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
                for name, tensor in bucket
            ]
            last = {"last": bucket is buckets[-1]} | ({"version": version} if version else {})
            answer = self._pool.submit(self._post, "/update_weights", {"tensors": described} | last)
            for _, tensor in bucket:
                dist.broadcast(tensor.detach().contiguous(), src=0)
            state = answer.result()
        return str(state["weights_version"])

    def close(self) -> None:
        self._post("/close_weights_group", {})
        dist.destroy_process_group()
        self._http.close()

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._http.post(path, json=body).raise_for_status().json()


def _buckets(tensors: Mapping[str, Tensor], most: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > most:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket


def _key() -> dict[str, str]:
    key = os.environ.get("QUIRE_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _folder(path: Path) -> dict[str, Tensor]:
    files: Iterable[Path] = sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Send a folder's weights to a running server")
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version")
    given = parser.parse_args()
    sender = Sender(given.url)
    print(sender.send(_folder(given.folder), given.version))
    sender.close()


if __name__ == "__main__":
    main()
