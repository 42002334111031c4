"""Build and loading of the CPU kernels: with and without a compiler, one OpenMP runtime, clean under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.kernels.cpu import native_library
from quire.kernels.cpu.backend import CpuBackend

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
ARM_COMPILER, ARM = "aarch64-linux-gnu-g++", "qemu-aarch64"

needs_kernels = pytest.mark.skipif(CpuBackend().missing_reason is not None, reason=str(CpuBackend().missing_reason))


def python(code: str, where: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"PATH": os.environ["PATH"], "PYTHONPATH": str(where), **environment}
    return subprocess.run([sys.executable, "-c", code], cwd=where, env=settings, capture_output=True, text=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the build needs, with the libraries that are built already."""
    shutil.copytree(ROOT / "quire/kernels", tmp_path / "quire/kernels", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "quire/engine").mkdir()
    for name in ("setup.py", "pyproject.toml", "quire/__init__.py", "quire/engine/__init__.py"):
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True)


def drop_libraries(tree: Path) -> None:
    for library in (tree / "quire/kernels/cpu").glob("*.so"):
        library.unlink()


@pytest.mark.slow
def test_install_without_compiler_falls_back_to_reference_backend(tree: Path) -> None:
    drop_libraries(tree)
    done = build(tree, PATH="/nowhere", CXX="")
    assert done.returncode == 0, done.stderr
    assert "no C++ compiler" in done.stderr
    code = "from quire.kernels.cpu.backend import CpuBackend; print(CpuBackend().missing_reason)"
    reason = python(code, tree).stdout.strip()
    assert "C++ compiler" in reason
    assert "\n" not in reason
    selection = python(
        "import torch; from quire.kernels.backend_selection import select_backend;"
        "backend, why = select_backend(torch.device('cpu'), torch.bfloat16, 64); print(backend.name, why)",
        tree,
    )
    assert selection.stdout.startswith("reference plain PyTorch")


def test_install_succeeds_when_compiler_fails(tree: Path) -> None:
    drop_libraries(tree)
    done = build(tree, CXX="false")
    assert done.returncode == 0, done.stderr
    assert "were not built" in done.stderr


@needs_kernels
def test_build_recompiles_only_stale_libraries(tree: Path) -> None:
    for library in (tree / "quire/kernels/cpu").glob("*.so"):
        library.touch()
    done = build(tree, CXX="false")
    assert done.returncode == 0, done.stderr
    assert "were not built" not in done.stderr
    (tree / "quire/kernels/cpu/simd.h").touch()
    assert "were not built" in build(tree, CXX="false").stderr


@pytest.mark.slow
@needs_kernels
def test_library_built_from_other_sources_is_not_loaded(tree: Path) -> None:
    code = "from quire.kernels.cpu.backend import CpuBackend; print(CpuBackend().missing_reason)"
    assert python(code, tree).stdout.startswith("None")
    with (tree / "quire/kernels/cpu/decoder/recorded.cpp").open("a") as source:
        source.write("// A field more, say.\n")
    assert "the C++ kernels cannot be loaded: they were built from other sources" in python(code, tree).stdout


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_process_loads_one_openmp_runtime() -> None:
    code = (
        "import re, torch; from quire.kernels.cpu.backend import CpuBackend; x = torch.ones(500, 2000);"
        "CpuBackend().rms_norm(x, x[0], 1e-5); x @ x.T;"
        "maps = open('/proc/self/maps').read(); print(len(set(re.findall(r'\\S*lib(?:g|i)?omp\\S*', maps))))"
    )
    done = python(code, OMP_NUM_THREADS="1")
    assert done.stdout.strip() == "1", done.stderr


@pytest.mark.slow
@needs_kernels
def test_quire_cpu_isa_selects_instruction_set() -> None:
    code = "from quire.kernels.cpu.backend import CpuBackend; print(CpuBackend().isa)"
    assert python(code, QUIRE_CPU_ISA="plain").stdout.strip() == native_library.ISAS["plain"]
    refused = python(code, QUIRE_CPU_ISA="mmx")
    assert refused.returncode != 0
    assert "QUIRE_CPU_ISA='mmx' is not one of plain, avx2" in refused.stderr


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_kernels_run_clean_under_sanitizers(tmp_path: Path) -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer over every kernel (sanitize.cpp), with random shapes."""
    flags = {
        "plain": [],
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx2_vnni": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
        "avx512": ["-march=skylake-avx512"],
        "avx512_vnni": ["-march=cascadelake"],
        "avx512_bf16": ["-march=cooperlake"],
        "avx512_amx": ["-march=sapphirerapids"],
    }[(native_library.loadable_isas() or ["plain"])[-1]]
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [Path(__file__).with_name("sanitize.cpp"), *sorted((ROOT / "quire/kernels/cpu").rglob("*.cpp"))]
    objects = [tmp_path / f"{source.stem}.o" for source in sources]
    common = [str(COMPILER), "-std=c++17", "-O1", "-Wno-psabi", "-ffp-contract=off", *flags, *sanitize]
    jobs = [
        subprocess.Popen([*common, "-c", source, "-o", target], stderr=subprocess.PIPE, text=True)
        for source, target in zip(sources, objects, strict=True)
    ]
    for job in jobs:
        _, said = job.communicate()
        if "cannot find" in said:
            pytest.skip("the compiler has no sanitizers")
        assert job.returncode == 0, said
    linked = subprocess.run([*common, *objects, "-o", tmp_path / "driver"], capture_output=True, text=True)
    if linked.returncode and "cannot find" in linked.stderr:
        pytest.skip("the compiler has no sanitizer runtime")
    done = subprocess.run([tmp_path / "driver"], capture_output=True, text=True)
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


def compile_driver(compiler: str, flags: list[str], folder: Path) -> Path:
    """Compile sanitize.cpp with all kernels, without sanitizers."""
    folder.mkdir()
    sources = [Path(__file__).with_name("sanitize.cpp"), *sorted((ROOT / "quire/kernels/cpu").rglob("*.cpp"))]
    objects = [folder / f"{source.stem}.o" for source in sources]
    common = [compiler, "-std=c++17", "-O1", "-Wno-psabi", "-ffp-contract=off", *flags]
    for source, target in zip(sources, objects, strict=True):
        subprocess.run([*common, "-c", source, "-o", target], check=True)
    subprocess.run([*common, "-pthread", *objects, "-o", folder / "driver"], check=True)
    return folder / "driver"


def results(path: Path) -> list[torch.Tensor]:
    """The arrays that the driver wrote: each one's size, then its numbers."""
    numbers, arrays = torch.from_file(str(path), size=path.stat().st_size // 4, dtype=torch.float32), []
    while len(numbers):
        size = int(numbers[0])
        arrays.append(numbers[1 : 1 + size])
        numbers = numbers[1 + size :]
    return arrays


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.skipif(shutil.which(ARM_COMPILER) is None, reason=f"no {ARM_COMPILER} (package g++-aarch64-linux-gnu)")
@pytest.mark.skipif(shutil.which(ARM) is None, reason=f"no {ARM} (package qemu-user)")
def test_neon_kernels_match_plain_kernels(tmp_path: Path) -> None:
    """Every kernel with random shapes, compiled for 64-bit ARM with dot products and run by an emulator. Another order
    of sums and fused products may change a rounding to 8 bits.
    """
    plain = compile_driver(str(COMPILER), [], tmp_path / "plain")
    arm = compile_driver(ARM_COMPILER, ["-march=armv8.2-a+dotprod", "-static"], tmp_path / "arm")
    subprocess.run([plain, tmp_path / "plain.bin"], check=True, capture_output=True)
    done = subprocess.run([ARM, arm, tmp_path / "arm.bin"], capture_output=True, text=True)
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr
    expected, got = results(tmp_path / "plain.bin"), results(tmp_path / "arm.bin")
    assert len(expected) == len(got) > 400
    for each, other in zip(expected, got, strict=True):
        assert (each - other).abs().max() <= 0.02 * each.abs().max()


WITHOUT_THREADS = """
import os, resource, torch
from quire.kernels.cpu.backend import CpuBackend

cpu = CpuBackend()
torch.set_num_threads(1)
x = torch.randn(300, 704)
wanted = cpu.silu_mul(x)
torch.set_num_threads(5)
count = lambda: len(os.listdir("/proc/self/task"))
before, size = count(), int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), limits[1]))  # no room for the stack of a thread
got = cpu.silu_mul(x)
resource.setrlimit(resource.RLIMIT_AS, limits)
print(count() - before, torch.equal(got, wanted))
"""


@pytest.mark.slow
@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory as Linux does")
def test_kernel_runs_on_existing_threads_when_no_thread_starts() -> None:
    done = python(WITHOUT_THREADS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "True"]


@needs_kernels
def test_description_advises_make_install_for_unbuilt_isa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The case of a checkout that was copied from another machine."""
    cpu, best = CpuBackend(), native_library.loadable_isas()[-1]
    assert native_library.best_unbuilt_isa() is None
    shutil.copy(ROOT / "quire/kernels/cpu/plain.so", tmp_path)
    monkeypatch.setattr(native_library, "HERE", tmp_path)
    assert native_library.best_unbuilt_isa() == (None if best == "plain" else best)
    assert ("`make install` compiles it" in cpu.description()) == (best != "plain")
