"""The Triton kernels' tests: compiled if there is a GPU, else under Triton's interpreter, in a separate process.

Triton reads TRITON_INTERPRET once, when it is imported, and other tests share a process with this folder. So
tests/kernels/test_triton.py starts a process with the variable set. Without it and without a GPU nothing here is
collected.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not INTERPRETED:
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20)


@pytest.fixture(scope="session", autouse=True)
def _bfloat16_as_on_a_gpu() -> None:
    """The interpreter stores bfloat16 as uint16. In 3.6 and 3.7 tl.dot multiplies those, and casts truncate."""
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def wide(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: object) -> TensorHandle:
        return dot(self, wide(a), wide(b), *rest)

    def cast_impl(self: InterpreterBuilder, source: TensorHandle, target: tl.dtype) -> TensorHandle:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
            return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)
        if source.dtype.scalar == tl.bfloat16 and target.scalar == tl.float32:
            return wide(source)
        if source.dtype.scalar == tl.int8 and target.scalar == tl.bfloat16:
            return cast_impl(self, cast(self, source, tl.float32), target)
        return cast(self, source, target)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl


def run_again(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Stands for a graph: a replay runs the function again."""
    result = function()
    return lambda: result.copy_(function()), result  # type: ignore[return-value]
