"""Kernel tests run on every instruction set that was built and that this machine has: on the plainest and the best with
every change. The slow tests also have matrix tiles, whose instructions are computed one number after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.kernels.cpu import build, native
from quire.kernels.cpu.backend import Cpu


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cpu" in metafunc.fixturenames:
        missing = pytest.param("", marks=pytest.mark.skip(reason=str(native.load())))
        isas = native.runnable()
        slow = dict.fromkeys([*isas[1:-1], TILES], pytest.mark.slow)
        isas += [TILES] if isas and emulates(isas) else []
        metafunc.parametrize(
            "cpu", [pytest.param(isa, marks=slow.get(isa, ())) for isa in isas] or [missing], indirect=True
        )


@pytest.fixture
def cpu(request: pytest.FixtureRequest) -> Cpu:
    """The backend on this instruction set."""
    return Cpu(_library(request.param))


_loaded: dict[str, native.Native] = {}


def _library(isa: str) -> native.Native:
    if isa not in _loaded:
        _loaded[isa] = with_tiles() if isa == TILES else native.Native(isa)
    return _loaded[isa]


TILES = "tiles"
BASE = "avx512_bf16"
"""What tiles stand beside."""


def emulates(isas: list[str]) -> bool:
    return BASE in isas and "avx512_amx" not in isas and build.compiler() is not None


def with_tiles() -> native.Native:
    """A library that computes as one with tiles does."""
    command = build.compiler()
    assert command is not None
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(build.FLAGS, BASE, [*build.FLAGS[BASE], "-DEMULATE_TILES"])
        assert build.build(command, [BASE], Path(folder)) == {}
        patch.setattr(native, "HERE", Path(folder))
        return native.Native(BASE)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20)


@pytest.fixture
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
