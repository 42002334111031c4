"""Copies of KV pages between the device and the host's memory, as the tiers ask for them (engine/tiers).

A page's bytes are those of all its tensors, one after the other; of 8-bit pages the scales are among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.engine.core.executor import PageMover

Claim = Callable[[Iterable[int]], None]


def page_mover(pages: Sequence[Tensor], computes: str, claim: Claim | None = None) -> PageMover:
    """`pages`: what allocate_pages made, of all that keeps pages of the same numbers; `computes`: what fills them, and
    what else their bits may depend on; `claim`: told of pages that are going to be written."""
    on_gpu = bool(pages) and pages[0].device.type == "cuda"
    return CudaPages(pages, computes) if on_gpu else HostPages(pages, computes, claim)


def layout_of(pages: Sequence[Tensor], computes: str) -> str:
    kinds = [(len(each), *each.shape[2:], str(each.dtype)) for each in pages]
    return f"{computes}, torch {torch.__version__}, {torch.get_num_threads()} threads, {kinds}"


class HostPages:
    """A PageMover for pages in the host's memory. It copies with NumPy, which keeps other threads neither from Python
    nor from PyTorch's own threads."""

    def __init__(self, pages: Sequence[Tensor], computes: str, claim: Claim | None = None) -> None:
        self.layout = layout_of(pages, computes)
        self._claim = claim
        self._pages = [_flat(each).numpy() for each in pages]
        self._ends = np.cumsum([each[:, 0].size for each in self._pages]).tolist()
        self.page_bytes: int = self._ends[-1] if self._ends else 0  # of a model without attention

    def claim(self, pages: Sequence[int]) -> None:
        if self._claim is not None:
            self._claim(pages)

    def read(self, page: int) -> memoryview:
        copy = np.empty(self.page_bytes, dtype=np.uint8)
        for tensors, part in self._parts(copy):
            part[:] = tensors[:, page]
        return copy.data

    def write(self, page: int, content: bytes | memoryview) -> None:
        for tensors, part in self._parts(np.frombuffer(content, dtype=np.uint8)):
            tensors[:, page] = part

    def _parts(self, page: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each kind of tensors, [tensors, pages, bytes], and its part of a page's bytes, [tensors, bytes]."""
        for tensors, begin, end in zip(self._pages, [0, *self._ends], self._ends, strict=False):
            yield tensors, page[begin:end].reshape(len(tensors), -1)


class CudaPages:
    """A PageMover for a GPU: through pinned memory, on streams of its own, which wait for what was launched before."""

    def __init__(self, pages: Sequence[Tensor], computes: str) -> None:
        device = pages[0].device
        self.layout = layout_of(pages, f"{computes}, {torch.cuda.get_device_name(device)}")
        self._pages = [_flat(each) for each in pages]
        self._sizes = [each[:, 0].numel() for each in self._pages]
        self.page_bytes = sum(self._sizes)
        self._computing = torch.cuda.current_stream(device)
        self._reading, self._writing = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def claim(self, pages: Sequence[int]) -> None:
        """Nothing else touches a GPU's pages."""

    @torch.inference_mode()
    def read(self, page: int) -> memoryview:
        copy = torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=True)
        self._reading.wait_stream(self._computing)
        with torch.cuda.stream(self._reading):
            copy.copy_(torch.cat([each[:, page].flatten() for each in self._pages]), non_blocking=True)
        self._reading.synchronize()
        return copy.numpy().data

    @torch.inference_mode()
    def write(self, page: int, content: bytes | memoryview) -> None:
        staged = torch.empty(self.page_bytes, dtype=torch.uint8, pin_memory=True)
        staged.numpy()[:] = np.frombuffer(content, dtype=np.uint8)
        self._writing.wait_stream(self._computing)
        with torch.cuda.stream(self._writing):
            parts = staged.to(self._pages[0].device, non_blocking=True).split(self._sizes)
            for each, part in zip(self._pages, parts, strict=True):
                each[:, page] = part.view(len(each), -1)
        self._writing.synchronize()


def _flat(pages: Tensor) -> Tensor:
    """[tensors, pages, bytes] of the same memory."""
    return pages.view(torch.uint8).flatten(2)
