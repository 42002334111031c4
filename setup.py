"""Builds the C++ kernels when Quire is installed; everything else about the package is in pyproject.toml.

`quire/kernels/cpu/**/*.cpp` is compiled once per instruction set into `quire/kernels/cpu/<set>.so`, by plain g++ (or
$CXX): neither Python's nor PyTorch's headers are used, so one wheel serves every Python and every PyTorch, and the best
library is chosen at run time (kernels/cpu/native.py). Where there is no compiler the install succeeds without the
libraries, and Quire serves on PyTorch's ops.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("quire/kernels/cpu")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
VNNI = [*AVX512, "-mavx512vnni"]
X86 = {
    "avx2": AVX2,
    "avx2_vnni": [*AVX2, "-mavxvnni"],
    "avx512": AVX512,
    "avx512_vnni": VNNI,
    "avx512_bf16": [*VNNI, "-mavx512bf16"],
}
ARM = {"neon_dot": ["-march=armv8.2-a+dotprod"]}
ISAS = {"plain": []} | (ARM if platform.machine() in ("aarch64", "arm64") else X86)
COMPILE = ["-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
LINK = ["-shared", "-pthread", *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [])]


def compiler() -> str | None:
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    return None


def sources() -> list[Path]:
    return sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")])


def compile_library(cxx: str, isa: str, target: Path) -> str:
    """An empty string, or what the compiler said. Compiling one file per process is quicker where there are cores."""
    objects = []
    sum_of_sources = zlib.crc32(b"".join(path.read_bytes() for path in sources()))  # native.py compares it
    flags = [*COMPILE, *ISAS[isa], f"-DSUM_OF_SOURCES={sum_of_sources}u"]
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted(SOURCES.rglob("*.cpp")):
            objects.append(str(Path(folder, source.stem + ".o")))
            command = [*cxx.split(), *flags, "-c", str(source), "-o", objects[-1]]
            if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
                return done.stderr or f"{cxx} failed"
        built = Path(folder, target.name)
        done = subprocess.run([*cxx.split(), *LINK, *objects, "-o", str(built)], capture_output=True, text=True)
        if done.returncode == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(built, target.with_suffix(".new"))
            target.with_suffix(".new").replace(target)  # a running server keeps the library it has mapped
        return (done.stderr or f"{cxx} failed") if done.returncode else ""


class BuildKernels(build_ext):
    """Puts the libraries beside their sources (editable installs) or into the wheel."""

    def targets(self) -> dict[str, Path]:
        root = Path() if self.inplace or self.editable_mode else Path(self.build_lib)
        return {isa: root / SOURCES / f"{isa}.so" for isa in ISAS}

    def run(self) -> None:
        cxx = compiler()
        if cxx is None:
            self.warn("no C++ compiler found: Quire will serve on PyTorch's ops, several times slower")
            return
        newest = max(path.stat().st_mtime for path in [Path(__file__), *sources()])
        stale = {i: t for i, t in self.targets().items() if not t.exists() or t.stat().st_mtime < newest}
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            results = pool.map(lambda item: (item[0], compile_library(cxx, *item)), stale.items())
        for isa, failure in results:
            if failure:  # another CPU family, or a compiler too old for this set: the others remain
                self.warn(f"kernels for {isa} were not built: {failure.strip().splitlines()[0]}")

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self.targets().values() if path.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return [str(path) for path in sources()]


class AnyPython(bdist_wheel):
    """The libraries depend on the platform, not on the Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("quire.kernels.cpu", sources=[])],  # marks the wheel as belonging to a platform
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
)
