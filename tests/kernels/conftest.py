"""Kernel tests run on every instruction set that was built and that this machine has. Every change runs the plainest
and the best one; the slow tests run all, and matrix tiles too, emulated by traps if the processor has none
(trapped.py). Both take minutes to compile, so each runs in one shard of `make test-all`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from quire.kernels.cpu import native_library
from quire.kernels.cpu.backend import CpuBackend
from tests.kernels import trapped
from tests.tiers import leaves_out_slow


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cpu" in metafunc.fixturenames:
        isas = [each for each in _isas() if not (leaves_out_slow(metafunc.config) and each.marks)]
        metafunc.parametrize("cpu", isas, indirect=True)


@cache
def _isas() -> tuple[Any, ...]:
    """Parameters of the fixture `cpu`."""
    isas = native_library.loadable_isas()
    slow = dict.fromkeys(isas[1:-1], (pytest.mark.slow, pytest.mark.beside("tests/kernels/conftest.py")))
    slow[TILES] = (pytest.mark.slow, pytest.mark.beside("tests/kernels/test_tiles.py"))
    isas += [TILES] if trapped.can_trap() else []
    missing = pytest.param("", marks=pytest.mark.skip(reason=str(native_library.load_library_or_reason())))
    return tuple(pytest.param(isa, marks=slow.get(isa, ())) for isa in isas) or (missing,)


@pytest.fixture
def cpu(request: pytest.FixtureRequest) -> CpuBackend:
    """The backend on this instruction set."""
    return CpuBackend(_library(request.param))


_loaded: dict[str, native_library.NativeLibrary] = {}


def _library(isa: str) -> native_library.NativeLibrary:
    if isa not in _loaded:
        _loaded[isa] = trapped.tiles() if isa == TILES else native_library.NativeLibrary(isa)
    return _loaded[isa]


TILES = "tiles"


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20)


@pytest.fixture
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
