"""Copies between host and device, asynchronous with CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16


def upload_arrays(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Upload all arrays in one copy, from pinned memory with CUDA. On the CPU the tensors share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    size = _end_offsets(arrays)[-1]
    if size == 0:
        return unpack_arrays(torch.empty(0, dtype=torch.uint8, device=device), arrays)
    pinned = device.type == "cuda"
    staged = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    pack_arrays_into(staged, arrays)
    return unpack_arrays(staged.to(device, non_blocking=pinned), arrays)


def copy_into(array: np.ndarray, target: Tensor) -> None:
    if target.device.type == "cpu":
        target.copy_(torch.from_numpy(array))
        return
    pinned = target.device.type == "cuda"
    staged = torch.empty(_end_offsets([array])[-1], dtype=torch.uint8, pin_memory=pinned)
    pack_arrays_into(staged, [array])
    target.copy_(unpack_arrays(staged, [array])[0], non_blocking=pinned)


def pack_arrays_into(staged: Tensor, arrays: Sequence[np.ndarray]) -> None:
    """Each array starts at a multiple of 16 bytes."""
    target = staged.numpy()
    for array, end in zip(arrays, _end_offsets(arrays), strict=True):
        begin = end - _padded_bytes(array)
        target[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def unpack_arrays(laid: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    tensors = []
    for array, end in zip(arrays, _end_offsets(arrays), strict=True):
        begin = end - _padded_bytes(array)
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        tensors.append(laid[begin : begin + array.nbytes].view(dtype).view(array.shape))
    return tensors


def _padded_bytes(array: np.ndarray) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


def _end_offsets(arrays: Sequence[np.ndarray]) -> list[int]:
    return np.cumsum([_padded_bytes(array) for array in arrays]).tolist()


class HostDownload:
    """Copies tensors to the host on a side stream, so that later computations do not wait."""

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None) -> None:
        """Without a stream (not on CUDA), `wait_for_copy` copies."""
        self.tensors = list(tensors)
        self._copied: torch.cuda.Event | None = None
        if stream is None:
            return
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for index, tensor in enumerate(tensors):
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self.tensors[index] = host.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)  # keeps the memory until it is copied
            self._copied = stream.record_event()

    def wait_for_copy(self) -> list[Tensor]:
        if self._copied is not None:
            self._copied.synchronize()
        return [each.cpu() for each in self.tensors]
