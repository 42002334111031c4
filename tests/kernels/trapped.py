"""A processor with matrix tiles (AMX): if this one has none, trap.cpp executes their instructions; otherwise the same
code runs unchanged.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from quire.kernels.cpu import build, native_library
from tests.made_once import made_once

ROOT = Path(__file__).resolve().parents[2]
AMX, BASE = "avx512_amx", "avx512_bf16"
"""The instruction set with tiles, and the one that it extends."""
FAKE_CPUID = """
#include_next <cpuid.h>
static int with_tiles(unsigned leaf, unsigned part, unsigned* a, unsigned* b, unsigned* c, unsigned* d) {
  const int known = __get_cpuid_count(leaf, part, a, b, c, d);
  if (leaf == 7 && part == 0) *d |= 1u << 22 | 1u << 24 | 1u << 25;
  return known;
}
#define __get_cpuid_count with_tiles
"""
"""A <cpuid.h> that reports tiles."""
COPIED = ("quire", "benchmarks", "tests")


def has_tiles() -> bool:
    return AMX in native_library.loadable_isas()


def can_trap() -> bool:
    """True if the processor has everything except tiles."""
    there = sys.platform == "linux" and BASE in native_library.loadable_isas() and build.find_compiler() is not None
    return there and not has_tiles()


needs_tiles = pytest.mark.skipif(
    not has_tiles() and not can_trap(), reason="no compiler, no AVX-512 with bf16, or not Linux"
)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Compiled files, for as long as this process lives."""
    return tempfile.TemporaryDirectory(prefix="quire-tiles-")


def _compile(made: str, *arguments: str | Path) -> Path:
    command, target = build.find_compiler(), Path(_folder().name, made)
    assert command is not None
    subprocess.run([*command, *build.COMPILE_FLAGS, *build.LINK_FLAGS, *arguments, "-o", target], check=True)
    return target


@cache
def trap_library() -> Path:
    sources = (ROOT / "tests/kernels/trap.cpp", ROOT / "quire/kernels/cpu/tiles/tiles.cpp")
    return _compile("trap.so", *build.AVX2, "-DEMULATE_TILES", *sources, "-ldl")


@cache
def trap() -> ctypes.CDLL | None:
    """Let this process use tiles from here on. Returns None if the processor has them."""
    if has_tiles():
        return None
    library = ctypes.CDLL(str(trap_library()))
    library.done_of.restype = ctypes.c_long
    library.permit_tiles()
    return library


def _load(library: Path) -> native_library.NativeLibrary:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "HERE", library.parent)
        return native_library.NativeLibrary(library.stem)


def _build(isa: str, folder: str, *flags: str) -> Path:
    """A library compiled with more flags, once for all processes of a run: it takes a minute."""
    command = build.find_compiler()
    assert command is not None

    def make(target: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(build.ISA_FLAGS, isa, [*build.ISA_FLAGS[isa], *flags])
            assert build.build_libraries_returning_errors(command, [isa], target) == {}

    return made_once(Path(_folder().name, folder), make, "kernels", isa, flags) / f"{isa}.so"


@cache
def emulation() -> Path:
    """A library that computes as one with tiles does, without tile instructions."""
    return _build(BASE, "emulation", "-DEMULATE_TILES")


@cache
def instructions() -> Path:
    """The library with tile instructions: the one that `make all-kernels` has built, else compiled now."""
    try:
        native_library.NativeLibrary(AMX)
    except (OSError, AttributeError):
        return _build(AMX, "instructions")
    return native_library.HERE / f"{AMX}.so"


@cache
def emulated_tiles() -> native_library.NativeLibrary:
    return _load(emulation())


@cache
def tiles() -> native_library.NativeLibrary:
    """The library with tile instructions, trapped if the processor has none."""
    trap()
    return _load(instructions())


@dataclass(frozen=True)
class Machine:
    """A copy of the project on a machine that seems to have tiles. Only what asks the processor and the system is
    replaced; the rest, from the choice of the library on, is unchanged.
    """

    folder: Path
    environment: dict[str, str]

    def run(self, *arguments: str, timeout: float = 600, **more: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments."""
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment | more,
            capture_output=True,
            text=True,
            timeout=timeout,
        )


def machine(folder: Path) -> Machine:
    """Make the machine in `folder`."""
    for name in COPIED:
        unused = shutil.ignore_patterns("__pycache__", "clients")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=unused)
    shutil.copy(ROOT / "pyproject.toml", folder)
    settings = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    if has_tiles():
        return Machine(folder, settings)
    kernels = folder / "quire/kernels/cpu"
    shutil.copy2(instructions(), kernels / f"{AMX}.so")
    fake = folder / "fake"
    fake.mkdir()
    (fake / "cpuid.h").write_text(FAKE_CPUID)
    (kernels / "plain.so").rename(kernels / "plain_kernels.so")  # all but what asks the processor
    sums = zlib.crc32(b"".join(path.read_bytes() for path in build.source_files()))
    asking = _compile(
        "asking.so",
        f"-I{fake}",
        f"-DSUM_OF_SOURCES={sums}u",
        ROOT / "quire/kernels/cpu/isa.cpp",
        "-Wl,--no-as-needed",
        kernels / "plain_kernels.so",
    )
    shutil.copy2(asking, kernels / "plain.so")
    return Machine(folder, settings | {"LD_PRELOAD": str(trap_library())})
