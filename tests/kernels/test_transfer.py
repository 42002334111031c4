"""Arrays packed into one staging buffer, uploaded and downloaded, come out unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.gpu.host_transfer import HostDownload, pack_arrays_into, unpack_arrays, upload_arrays

ARRAYS = [
    np.arange(5, dtype=np.int32),
    np.arange(12, dtype=np.int64).reshape(3, 4)[:, :2],  # not contiguous
    np.empty(0, dtype=np.int64),
    np.array([True, False, True]),
    np.linspace(0, 1, 7),
    np.empty((0, 3), dtype=np.int32),
]


def test_packed_arrays_unpack_unchanged() -> None:
    staged = torch.full((1000,), 77, dtype=torch.uint8)
    pack_arrays_into(staged, ARRAYS)
    for tensor, array in zip(unpack_arrays(staged, ARRAYS), ARRAYS, strict=True):
        assert torch.equal(tensor, torch.from_numpy(np.ascontiguousarray(array)))
        assert tensor.data_ptr() % 16 == staged.data_ptr() % 16


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_arrays_survive_upload_and_download(device: str) -> None:
    there = upload_arrays(ARRAYS, torch.device(device))
    assert all(tensor.device.type == device for tensor in there)
    back = HostDownload(there, torch.cuda.Stream() if device == "cuda" else None).wait_for_copy()
    for tensor, array in zip(back, ARRAYS, strict=True):
        assert tensor.device.type == "cpu"
        assert np.array_equal(tensor.numpy(), array)


class Recorded:
    """A CUDA runtime that only records the order of its calls. Its memory is the host's."""

    device = torch.device("cuda", 0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        self.pinned: list[torch.Tensor] = []
        """Kept alive, so that no two share an address."""
        empty, copy = torch.empty, torch.Tensor.copy_

        def made(*shape: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
            tensor = empty(*shape, **named)
            if pin_memory:
                self.pinned.append(tensor)
                self.calls.append(("pin", tensor.data_ptr()))
            return tensor

        def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            self.calls.append(("copy" if non_blocking else "copy and wait", target.data_ptr()))
            return copy(target, source)

        @contextlib.contextmanager
        def entered(stream: Recorded) -> Iterator[None]:
            self.calls.append(("enter", 0))
            yield
            self.calls.append(("leave", 0))

        monkeypatch.setattr(torch, "empty", made)
        monkeypatch.setattr(torch.Tensor, "copy_", copied)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda each, _: self.calls.append(("keep", each.data_ptr())))
        monkeypatch.setattr(torch.cuda, "stream", entered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)

    def wait_stream(self, other: Recorded) -> None:
        self.calls.append(("after what is computed", 0))

    def record_event(self) -> Recorded:
        self.calls.append(("event", 0))
        return self

    def synchronize(self) -> None:
        self.calls.append(("wait", 0))


def test_concurrent_downloads_use_separate_pinned_memory_and_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of two downloads has its own pinned memory, which nothing writes after its event. Their sources are not
    reused until the copy is done. Only the reader of a result waits.
    """
    runtime = Recorded(monkeypatch)
    tensors = [torch.arange(5), torch.ones(3)]
    first, second = (HostDownload(tensors, runtime) for _ in range(2))  # type: ignore[arg-type]
    assert len({each.data_ptr() for each in runtime.pinned}) == 4
    ordered = [
        ("after what is computed", 0),
        ("enter", 0),
        *[
            call
            for source, target in zip(tensors, runtime.pinned, strict=False)
            for call in (("pin", target.data_ptr()), ("copy", target.data_ptr()), ("keep", source.data_ptr()))
        ],
        ("event", 0),
        ("leave", 0),
    ]
    half = len(runtime.calls) // 2
    assert runtime.calls[:half] == ordered
    assert [kind for kind, _ in runtime.calls[half:]] == [kind for kind, _ in ordered]
    written = {place for kind, place in runtime.calls[half:] if kind == "copy"}
    assert not written & {place for kind, place in runtime.calls[:half] if kind == "copy"}
    before = len(runtime.calls)
    for each in (first, second):
        assert all(torch.equal(*pair) for pair in zip(each.wait_for_copy(), tensors, strict=True))
    assert [kind for kind, _ in runtime.calls[before:]] == ["wait", "wait"]
