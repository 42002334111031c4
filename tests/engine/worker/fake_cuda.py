"""A GPU of which only the shapes are real: PyTorch's FakeTensorMode tracks the device of every tensor, and this module
detects what would make the host wait.

FakeTensorMode itself rejects operators on tensors of two devices, and reading values (`item`, `nonzero`, masks as
indices). `Waiting` rejects what it lets pass: copies between host and device that the host would wait for, and indices
on the host, which PyTorch copies first.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.kernels.gpu import host_transfer

if TYPE_CHECKING:
    import pytest

DEVICE = torch.device("cuda", 0)
PICKED = 300
"""The token that every step samples."""
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);
}
"""
"""Indexing asks for the current GPU even if all tensors are fake, which a PyTorch without CUDA cannot answer."""


def load_guard(folder: Path) -> None:
    """Let a PyTorch without CUDA index fake tensors on a GPU, for the rest of this process. Skips the test if there is
    no compiler.
    """
    with FakeTensorMode():
        try:
            torch.empty(2, device=DEVICE)[torch.zeros(1, dtype=torch.int64, device=DEVICE)]
        except RuntimeError:
            pass
        else:
            return
    if (compiler := shutil.which("c++")) is None:
        import pytest  # the image, for which kernels are compiled too, lacks it

        pytest.skip("there is no C++ compiler")
    at, source, built = Path(torch.__file__).parent, folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    options = ["-std=c++20", "-shared", "-fPIC", f"-I{at / 'include'}", f"-L{at / 'lib'}"]
    subprocess.run([compiler, *options, str(source), "-lc10", "-o", str(built)], check=True)
    torch.ops.load_library(str(built))


class FakeTensors(FakeTensorMode):
    """Asks for no real GPU even if another test of this process has registered a device (other_device.py)."""

    avoid_device_init = True


class Waiting(TorchDispatchMode):
    """Rejects operators that the host would wait for, inside a capture all that needs the host's memory, and writes to
    pinned memory with an open copy from or to it: only PyTorch knows when the copy has ended, and reuses the memory
    then.
    """

    capturing = False
    lasting: Sequence[Tensor] = ()
    """Pinned memory allocated earlier and never freed: a graph may copy from it again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[Tensor] = []
        """Kept alive, so that no two share an address."""
        self.under_way: set[int] = set()
        """Storages of pinned memory with an open copy."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pin = kwargs.pop("pin_memory", False)
        assert not (pin and Waiting.capturing), "a capture allocates pinned memory"
        if func in COPIES:
            self._check_copy(func, args, kwargs)
        else:
            if func == torch.ops.aten.where.self:
                assert len({each.device for each in args}) == 1, "where copies a number to the GPU, and waits"
            kinds = {each.device.type for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.ndim}
            assert len(kinds) < 2, f"{func} of tensors on {kinds}"
            for given, said in zip(args, func._schema.arguments, strict=False):
                if said.is_write and isinstance(given, Tensor):
                    self.check_untouched(given)
        result = func(*args, **kwargs)
        if pin:
            assert result.device.type == "cpu", "PyTorch pins the host's memory alone"
            self.pinned.append(result)
        return result

    def _check_copy(self, func: Any, args: Any, kwargs: Any) -> None:
        if func == torch.ops.aten.copy_.default:
            target, source, *more = args
            where, waits = target.device.type, not (kwargs.get("non_blocking") or any(more))
        else:
            (source,) = args
            target = None
            where, waits = torch.device(kwargs.get("device") or source.device).type, not kwargs.get("non_blocking")
        if where == source.device.type or any(source is each for each in Waiting.lasting):
            return
        assert not Waiting.capturing, f"{func} to {where} in a capture"
        assert not waits, f"{func} to {where} waits"
        here = source if where == "cuda" else target
        assert self._is_pinned(here), f"{func} to {where} of memory that may move"
        if where == "cpu":
            self.check_untouched(here)
        self.under_way.add(here.untyped_storage()._cdata)

    def check_untouched(self, tensor: Tensor) -> None:
        """Assert that no copy from or to this tensor is open, before a write to it."""
        assert tensor.untyped_storage()._cdata not in self.under_way, "a copy from or to this memory is under way"

    def _is_pinned(self, tensor: Tensor | None) -> bool:
        storages = {each.untyped_storage()._cdata for each in self.pinned}
        return tensor is not None and tensor.untyped_storage()._cdata in storages


def recorded(tensor: Tensor, stream: FakeStream) -> None:
    """PyTorch has this operator only for tensors on a GPU."""
    assert tensor.is_cuda, "record_stream of a tensor on the host"


class FakeStream:
    device = DEVICE

    def __init__(self, *_: object) -> None:
        pass

    def wait_stream(self, other: FakeStream) -> None:
        pass

    def wait_event(self, event: None) -> None:
        pass

    def record_event(self) -> None:
        pass


class FakeGpu:
    """Code inside `never_waits` sees a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        load_guard(folder)
        self.tensors, self.waiting = FakeTensors(), Waiting()
        self.launched: list[str] = []
        """The launched Triton kernels."""
        self._until_wait = contextlib.ExitStack()
        for name in ("Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, FakeStream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(Tensor, "record_stream", recorded)
        monkeypatch.setattr(host_transfer, "pack_arrays_into", self._fill)
        monkeypatch.setattr(host_transfer.HostDownload, "wait_for_copy", lambda download: self._wait(download))
        self._replace_triton(monkeypatch)

    @contextlib.contextmanager
    def allows_waits(self) -> Iterator[None]:
        """For the engine's start, when waits do not matter."""
        with self.tensors:
            yield

    @contextlib.contextmanager
    def never_waits(self) -> Iterator[None]:
        with self.tensors, self.waiting:
            yield

    @contextlib.contextmanager
    def waits_once(self) -> Iterator[None]:
        """Like `never_waits`, up to the wait for a download, whose numbers are real: code after it sees no GPU."""
        with contextlib.ExitStack() as self._until_wait:
            self._until_wait.enter_context(self.never_waits())
            yield

    def _wait(self, download: host_transfer.HostDownload) -> list[Tensor]:
        self._until_wait.close()
        return [real(each) for each in download.tensors]

    def _fill(self, staged: Tensor, arrays: Sequence[np.ndarray]) -> None:
        """Fake memory has no bytes to fill."""
        assert staged.device.type == "cpu"
        assert staged.nbytes > 0, "an empty upload"
        self.waiting.check_untouched(staged)
        assert all(array.dtype != object for array in arrays)

    def _replace_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Kernels are not launched; their tensors must be on the GPU."""
        from triton.runtime.jit import JITFunction

        from quire.kernels.gpu import triton_launch_sizes

        def started(kernel: Any, *args: Any, grid: Any, **_: Any) -> None:
            for each in args:
                assert not isinstance(each, Tensor) or each.is_cuda, f"{kernel.__name__}: {each}"
            assert all(isinstance(number, int) and number > 0 for number in grid), f"{kernel.__name__}: {grid}"
            self.launched.append(kernel.__name__)

        monkeypatch.setattr(
            JITFunction, "run", lambda kernel, *args, grid, warmup, **_: started(kernel, *args, grid=grid)
        )
        monkeypatch.setattr(triton_launch_sizes, "num_multiprocessors", lambda device: 132)
        monkeypatch.setattr(triton_launch_sizes, "shared_memory_bytes", lambda device: 227 * 1024)
        monkeypatch.setattr(triton_launch_sizes, "is_hopper", lambda device: True)


def real(tensor: Tensor) -> Tensor:
    """A real host tensor in place of a fake one; as a sampled token its value is PICKED."""
    assert isinstance(tensor, FakeTensor)
    assert tensor.device.type == "cpu", "a result that stays on the device"
    return torch.full(tensor.shape, PICKED, dtype=tensor.dtype)
