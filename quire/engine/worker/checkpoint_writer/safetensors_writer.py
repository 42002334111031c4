from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from quire.engine.common.safetensors_dtypes import DTYPE_BYTES


class SafetensorsFileWriter:
    """Each tensor is written once, in any order. Methods raise OSError."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """`tensors`: the safetensors dtype and shape of each tensor, by its name."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        self._unwritten: dict[str, tuple[int, int]] = {}
        # Widest dtype first, because mapped tensors must be aligned to it.
        for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -DTYPE_BYTES[item[1][0]]):
            size = math.prod(shape) * DTYPE_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            self._unwritten[name] = (at, size)
            at += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._data_start = 8 + len(text)
        self._file = path.open("xb", buffering=0)
        self._write_at(len(text).to_bytes(8, "little") + text, 0)
        self._file.truncate(self._data_start + at)

    def __enter__(self) -> SafetensorsFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()
        assert error is not None or not self._unwritten, f"never written: {', '.join(self._unwritten)}"

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        at, size = self._unwritten.pop(name)
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().data
        assert data.nbytes == size, name
        self._write_at(data, self._data_start + at)

    def _write_at(self, data: bytes | memoryview, at: int) -> None:
        remaining = memoryview(data)
        while remaining:  # os.pwrite writes at most 2 GiB per call
            written = os.pwrite(self._file.fileno(), remaining, at)
            remaining, at = remaining[written:], at + written
