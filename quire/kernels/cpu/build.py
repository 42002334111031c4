"""Compiles the C++ kernels into `<set>.so`, one library per instruction set.

`python build.py` builds the plain set and this machine's best, `python build.py all` builds all sets. g++ (or $CXX)
needs no headers of Python or PyTorch, so one wheel serves all their versions. This file imports only the standard
library, because it runs inside pip's build.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
VNNI = [*AVX512, "-mavx512vnni"]
ISA_FLAGS = {
    "plain": [],
    "avx2": AVX2,
    "avx2_vnni": [*AVX2, "-mavxvnni"],
    "avx512": AVX512,
    "avx512_vnni": VNNI,
    "avx512_bf16": [*VNNI, "-mavx512bf16"],
    "avx512_amx": [*VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    "neon_dot": ["-march=armv8.2-a+dotprod"],
}
"""In the order of isa.cpp's bits, best last."""
IS_ARM = platform.machine() in ("aarch64", "arm64")
ISAS = [isa for isa in ISA_FLAGS if isa == "plain" or isa.startswith("neon") == IS_ARM]
COMPILE_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
]
LINK_FLAGS = ["-shared", "-pthread", *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [])]


def find_compiler() -> list[str] | None:
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return [*(["ccache"] if shutil.which("ccache") else []), *name.split()]
    return None


def source_files() -> list[Path]:
    return sorted([*HERE.rglob("*.cpp"), *HERE.rglob("*.h")])


def isas_to_build(cxx: list[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "isa.so")
        command = [*cxx, *COMPILE_FLAGS, *LINK_FLAGS, str(HERE / "isa.cpp"), "-o", str(library)]
        if subprocess.run(command, capture_output=True).returncode:
            return ISAS[:1]
        bits = ctypes.CDLL(str(library)).usable_isas()
    usable = [isa for bit, isa in enumerate(ISA_FLAGS) if bits >> bit & 1]
    return list(dict.fromkeys(["plain", usable[-1]]))


def build_libraries_returning_errors(cxx: list[str], isas: Collection[str], target: Path = HERE) -> dict[str, str]:
    """Returns the compiler's output by failed instruction set. Deletes outdated libraries of other sets. A concurrent
    build waits.
    """
    with _build_lock():
        return _build_stale_libraries(cxx, isas, target)


def _build_stale_libraries(cxx: list[str], isas: Collection[str], target: Path) -> dict[str, str]:
    newest = max(path.stat().st_mtime for path in [Path(__file__), *source_files()])
    stale = [path for path in (target / f"{isa}.so" for isa in ISA_FLAGS) if not _is_newer(path, newest)]
    wanted = [path for path in stale if path.stem in isas]
    for path in {*stale} - {*wanted}:
        path.unlink(missing_ok=True)
    sum_of_sources = zlib.crc32(b"".join(path.read_bytes() for path in source_files()))  # native_library.py compares it
    compile_one = [*COMPILE_FLAGS, f"-DSUM_OF_SOURCES={sum_of_sources}u", "-c"]
    longest_first = sorted(HERE.rglob("*.cpp"), key=lambda path: -path.stat().st_size)
    failed: dict[str, str] = {}

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count() or 1) as pool:

        def run_compiler(isa: str, arguments: list[str]) -> None:
            if isa not in failed:
                done = subprocess.run([*cxx, *arguments], capture_output=True, text=True)
                if done.returncode:
                    failed[isa] = done.stderr.strip() or f"{cxx[-1]} failed"

        objects: dict[str, list[str]] = {path.stem: [] for path in wanted}
        for source in longest_first:
            for isa, object_files in objects.items():
                object_files.append(str(Path(folder, f"{isa}.{source.stem}.o")))
                pool.submit(run_compiler, isa, [*compile_one, *ISA_FLAGS[isa], str(source), "-o", object_files[-1]])
        pool.shutdown()
        for library in wanted:
            built = Path(folder, library.name)
            run_compiler(library.stem, [*LINK_FLAGS, *objects[library.stem], "-o", str(built)])
            if library.stem not in failed:
                library.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(built, library.with_suffix(".new"))
                library.with_suffix(".new").replace(library)  # a running server keeps its mapped library
    return failed


@contextmanager
def _build_lock() -> Iterator[None]:
    folder = os.open(HERE, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _is_newer(library: Path, than: float) -> bool:
    return library.exists() and library.stat().st_mtime >= than


def main(arguments: list[str]) -> None:
    cxx = find_compiler()
    if cxx is None:
        print("no C++ compiler found: Quire will serve on PyTorch's ops, several times slower", file=sys.stderr)
        return
    for isa, error_output in build_libraries_returning_errors(
        cxx, ISAS if arguments == ["all"] else isas_to_build(cxx)
    ).items():
        print(f"kernels for {isa} were not built: {error_output.splitlines()[0]}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
