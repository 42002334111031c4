"""The built library with matrix tiles (AMX), whose instructions trap.cpp executes if the processor has none, gives the
bits of a plain emulation of the same sources.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.kernels.backend import NO_ADAPTERS
from quire.kernels.cpu.backend import CpuBackend
from tests.kernels import trapped
from tests.kernels.test_cpu_build import results
from tests.kernels.test_trap import CONFIGURE, RELEASE, function, shapes

pytestmark = [pytest.mark.slow, trapped.needs_tiles]
SOURCE = Path(__file__).with_name("sanitize.cpp")


def test_amx_kernels_equal_emulation_bit_for_bit(tmp_path: Path) -> None:
    """Random shapes, on one to three threads."""
    outputs = {}
    for name, library in (("emulated", trapped.emulation()), ("instructions", trapped.instructions())):
        driver, wrote = tmp_path / name, tmp_path / f"{name}.bin"
        command = [
            "g++",
            "-std=c++17",
            "-O1",
            "-pthread",
            SOURCE,
            library,
            "-o",
            driver,
            f"-Wl,-rpath,{library.parent}",
        ]
        subprocess.run(command, check=True)
        preload = {"LD_PRELOAD": str(trapped.trap_library()), "TILES": "permitted"}
        trapped_too = {} if name == "emulated" or trapped.has_tiles() else preload
        done = subprocess.run([driver, wrote], env=os.environ | trapped_too, capture_output=True, text=True)
        assert done.stdout.endswith("done\n"), done.stdout + done.stderr
        outputs[name] = results(wrote)
    assert len(outputs["emulated"]) == len(outputs["instructions"]) > 400
    for expected, got in zip(outputs["emulated"], outputs["instructions"], strict=True):
        assert torch.equal(expected.view(torch.int32), got.view(torch.int32))


@pytest.mark.usefixtures("keep_threads")
@pytest.mark.parametrize("threads", [1, 2])
def test_linear_releases_tiles_of_calling_thread(threads: int, generator: torch.Generator) -> None:
    """Between two calls another library may set other tile shapes, or none."""
    torch.set_num_threads(threads)
    tiles, trap = CpuBackend(trapped.tiles()), trapped.trap()
    linear = tiles.pack_linear(torch.randn((1024, 512), generator=generator).bfloat16(), None)
    x = torch.randn((16, 512), generator=generator).bfloat16()
    expected = linear(x, NO_ADAPTERS)
    assert trap is None or not trap.has_shapes()
    for code in ([CONFIGURE], [CONFIGURE, RELEASE]):
        function(*code)(shapes((3, 3, 2), (64, 8, 64)))
        assert torch.equal(linear(x, NO_ADAPTERS), expected)


def done(trap: ctypes.CDLL, work: Callable[[], object]) -> dict[str, int]:
    """How often `work` executes each instruction."""
    names = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps", "tdpbssd")
    before = [trap.done_of(name.encode()) for name in names]
    work()
    return {name: trap.done_of(name.encode()) - was for name, was in zip(names, before, strict=True)}


def test_linear_executes_expected_amx_instructions(generator: torch.Generator) -> None:
    """For 16 rows and 64 outputs, a block of 32 inputs takes 4 products and 5 loads; the sums are stored once."""
    trap = trapped.trap()
    if trap is None:
        pytest.skip("the processor has tiles")
    linear = CpuBackend(trapped.tiles()).pack_linear(torch.randn((64, 320), generator=generator).bfloat16(), None)
    x = torch.randn((16, 320), generator=generator).bfloat16()
    assert done(trap, lambda: linear(x, NO_ADAPTERS)) == {
        "ldtilecfg": 1,
        "tilerelease": 1,
        "tilezero": 4,
        "tileloadd": 50,
        "tilestored": 4,
        "tdpbf16ps": 40,
        "tdpbssd": 0,
    }
