"""Tests that a block's bytes are read and written; CudaBlockMover is tested on host tensors, with streams that do
nothing.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from quire.engine.worker.block_movers import CudaBlockMover, HostBlockMover


class FakeStream:
    def __init__(self, *_: object) -> None:
        self.waited: list[object] = []
        self.synchronized = 0

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)

    def synchronize(self) -> None:
        self.synchronized += 1


def tensors() -> list[Tensor]:
    """Tensors of two kinds, as a model with draft heads has them."""
    generator = torch.Generator().manual_seed(1)
    one = torch.randn((6, 5, 2, 16, 8), generator=generator).to(torch.bfloat16)
    two = torch.randint(-127, 127, (2, 9, 4, 34), generator=generator).to(torch.int8)
    return [one, two, two.view(torch.float8_e4m3fn).clone(), torch.randn((2, 5, 3), generator=generator)]


def equal_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.fixture(params=["host", "cuda"])
def mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[object, list[Tensor]]:
    pages = tensors()
    if request.param == "host":
        return HostBlockMover(pages, "fake"), pages
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **kinds: empty(*shape, **kinds))
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "fake")
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    return CudaBlockMover(pages, "fake"), pages


def test_block_round_trips_without_changing_other_blocks(
    mover: tuple[HostBlockMover | CudaBlockMover, list[Tensor]],
) -> None:
    block_mover, pages = mover
    before = [each.clone() for each in pages]
    copy = block_mover.read_block(3)
    assert len(copy) == block_mover.block_bytes == sum(each[:, 0].numel() * each.element_size() for each in pages)
    for each in pages:
        each[:, 3] = each[:, 0]
    block_mover.write_block(3, bytes(copy))
    assert all(equal_bits(each, was) for each, was in zip(pages, before, strict=True))
    block_mover.write_block(1, copy)
    for each, was in zip(pages, before, strict=True):
        assert equal_bits(each[:, 1].contiguous(), was[:, 3].contiguous())
        assert equal_bits(each[:, [0, 2, 3, 4]].contiguous(), was[:, [0, 2, 3, 4]].contiguous())


def test_cuda_block_mover_waits_for_compute_and_synchronizes(
    mover: tuple[HostBlockMover | CudaBlockMover, list[Tensor]],
) -> None:
    block_mover, _ = mover
    if isinstance(block_mover, CudaBlockMover):
        block_mover.write_block(0, block_mover.read_block(2))
        for stream in (block_mover._read_stream, block_mover._write_stream):
            assert stream.waited == [block_mover._compute_stream]
            assert stream.synchronized == 1


def test_block_layout_depends_on_model_dtype_and_shape() -> None:
    one = HostBlockMover(tensors(), "fake")
    assert one.layout == HostBlockMover(tensors(), "fake").layout
    assert one.layout != HostBlockMover(tensors(), "other").layout
    assert one.layout != HostBlockMover([each.float() for each in tensors()], "fake").layout
    assert one.layout != HostBlockMover([each[:3] for each in tensors()], "fake").layout
