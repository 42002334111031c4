"""The Triton kernels without a GPU: the files of tests/kernels/triton under Triton's interpreter, each in a process of
its own, and what the compiler makes of the kernels for an H100."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHARED_MEMORY = 99 * 1024
"""Bytes that a thread block can have on a consumer GPU; an H100 has 227 KB."""
MOST_SPILLED = 256
"""Bytes a thread, on cards other than the H100, for whose registers the tiles were chosen."""

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.slow,
]


def run(arguments: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


@pytest.mark.parametrize("path", sorted((HERE / "triton").glob("test_*.py")), ids=lambda path: path.stem)
def test_under_the_interpreter(path: Path) -> None:
    # The interpreter multiplies with numpy, whose OpenBLAS on some CPUs (AMD's Zen) sums a row in another order in
    # another number of rows. On this kind it does not.
    environment = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Sandybridge"}
    said = run(["pytest", "-q", "-p", "no:cacheprovider", str(path)], environment)
    assert " passed" in said
    assert "skipped" not in said


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
def test_kernels_compile_for_other_gpus(capability: int, tmp_path: Path) -> None:
    """They compile, and fit in the shared memory of the smallest."""
    if find_spec("triton.backends.nvidia") is None:
        pytest.skip("this Triton has no compiler for NVIDIA GPUs")
    said = run(["tests.kernels.triton.compile_for_gpu", str(tmp_path), str(capability)], {"TRITON_INTERPRET": "0"})
    *kernels, last = [json.loads(line) for line in said.splitlines()]
    assert last == {"compiled_anew": 0}
    assert len(kernels) > 40
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_MEMORY, kernel
        assert kernel["spilled"] <= MOST_SPILLED, kernel


def test_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    """They compile, spill next to nothing, fit, use the tensor cores and asynchronous copies, and compile once."""
    if find_spec("triton.backends.nvidia") is None:
        pytest.skip("this Triton has no compiler for NVIDIA GPUs")
    said = run(["tests.kernels.triton.compile_for_gpu", str(tmp_path)], {"TRITON_INTERPRET": "0"})
    *kernels, last = [json.loads(line) for line in said.splitlines()]
    assert last == {"compiled_anew": 0}
    for kernel in kernels:
        assert kernel["spilled"] <= 16, kernel
        assert kernel["shared"] <= SHARED_MEMORY, kernel
    attends = [kernel for kernel in kernels if kernel["name"].startswith("attend") and kernel["dtype"] == "bf16"]
    assert len(attends) > 20
    for kernel in attends:
        code = kernel["code"]
        assert code["HGMMA"] + code["HMMA"] > 0, kernel
        assert code["LDGSTS"] > 0, kernel
    assert {kernel["name"] for kernel in kernels} >= {
        "pick_tokens",
        "gather_candidates",
        "_rope_kernel",
        "_norm_kernel",
    }
