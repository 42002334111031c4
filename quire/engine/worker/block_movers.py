"""Copies KV blocks between device and host (engine/tiers). A block's bytes are the bytes of all its tensors in order,
including the scales of an 8-bit KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.engine.common.executor import BlockMover

ClaimCallback = Callable[[Iterable[int]], None]


def choose_block_mover(tensors: Sequence[Tensor], identity: str, on_claim: ClaimCallback | None = None) -> BlockMover:
    """`identity` names everything that the blocks' bits depend on. `on_claim` receives the ids of blocks that are about
    to be written.
    """
    on_gpu = bool(tensors) and tensors[0].device.type == "cuda"
    return CudaBlockMover(tensors, identity) if on_gpu else HostBlockMover(tensors, identity, on_claim)


def describe_layout(tensors: Sequence[Tensor], identity: str) -> str:
    kinds = [(len(each), *each.shape[2:], str(each.dtype)) for each in tensors]
    return f"{identity}, torch {torch.__version__}, {torch.get_num_threads()} threads, {kinds}"


class HostBlockMover:
    """Copies with NumPy, which blocks neither other Python threads nor PyTorch's."""

    def __init__(self, tensors: Sequence[Tensor], identity: str, on_claim: ClaimCallback | None = None) -> None:
        self.layout = describe_layout(tensors, identity)
        self._on_claim = on_claim
        self._tensors = [_view_as_bytes(each).numpy() for each in tensors]
        self._part_ends = np.cumsum([each[:, 0].size for each in self._tensors]).tolist()
        self.block_bytes: int = self._part_ends[-1] if self._part_ends else 0  # 0 without attention

    def announce_block_writes(self, blocks: Sequence[int]) -> None:
        if self._on_claim is not None:
            self._on_claim(blocks)

    def read_block(self, block: int) -> memoryview:
        copy = np.empty(self.block_bytes, dtype=np.uint8)
        for tensors, part in self._iter_parts(copy):
            part[:] = tensors[:, block]
        return copy.data

    def write_block(self, block: int, content: bytes | memoryview) -> None:
        for tensors, part in self._iter_parts(np.frombuffer(content, dtype=np.uint8)):
            tensors[:, block] = part

    def _iter_parts(self, block_content: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields pairs: a tensor group [tensors, blocks, bytes], and its bytes of one block [tensors, bytes]."""
        for tensors, begin, end in zip(self._tensors, [0, *self._part_ends], self._part_ends, strict=False):
            yield tensors, block_content[begin:end].reshape(len(tensors), -1)


class CudaBlockMover:
    """Uses pinned memory, and streams of its own that wait for work already queued on the compute stream."""

    def __init__(self, tensors: Sequence[Tensor], identity: str) -> None:
        device = tensors[0].device
        self.layout = describe_layout(tensors, f"{identity}, {torch.cuda.get_device_name(device)}")
        self._tensors = [_view_as_bytes(each) for each in tensors]
        self._part_bytes = [each[:, 0].numel() for each in self._tensors]
        self.block_bytes = sum(self._part_bytes)
        self._compute_stream = torch.cuda.current_stream(device)
        self._read_stream, self._write_stream = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def announce_block_writes(self, blocks: Sequence[int]) -> None:
        """Does nothing, because GPU blocks are not prefaulted."""

    @torch.inference_mode()
    def read_block(self, block: int) -> memoryview:
        copy = torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=True)
        self._read_stream.wait_stream(self._compute_stream)
        with torch.cuda.stream(self._read_stream):
            copy.copy_(torch.cat([each[:, block].flatten() for each in self._tensors]), non_blocking=True)
        self._read_stream.synchronize()
        return copy.numpy().data

    @torch.inference_mode()
    def write_block(self, block: int, content: bytes | memoryview) -> None:
        staged = torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=True)
        staged.numpy()[:] = np.frombuffer(content, dtype=np.uint8)
        self._write_stream.wait_stream(self._compute_stream)
        with torch.cuda.stream(self._write_stream):
            parts = staged.to(self._tensors[0].device, non_blocking=True).split(self._part_bytes)
            for each, part in zip(self._tensors, parts, strict=True):
                each[:, block] = part.view(len(each), -1)
        self._write_stream.synchronize()


def _view_as_bytes(tensor: Tensor) -> Tensor:
    """Returns a view [tensors, blocks, bytes]."""
    return tensor.view(torch.uint8).flatten(2)
