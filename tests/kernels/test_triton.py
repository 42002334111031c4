"""The Triton kernels without a GPU: the files of tests/kernels/triton under Triton's interpreter, a process each, and
what the compiler makes of the kernels for NVIDIA GPUs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SHARED_MEMORY = 99 * 1024
"""Bytes of shared memory per thread block on a consumer GPU."""
OF_AN_H100 = 227 * 1024
"""Bytes of shared memory per thread block on an H100."""
MOST_SPILLED = 256
"""Spilled bytes per thread on GPUs other than the H100, for whose registers the tiles were chosen."""
CHUNKS = {"prepare_delta_chunks", "invert_delta_systems", "prepare_state_space_chunks", "advance_chunks"}
"""Kernels with sizes of their own on other GPUs, where they spill nothing."""

ON_HOPPER = {"attend_latents": 512, "attend_latent_splits": 192, "attend_expanded": 32, "multiply_experts": 64}
"""Kernels that spill more on an H100, and the bytes. Those of latents use up to 227 KB of tiles there alone, and are
faster so, as measured there. Experts of few bits spill for 9,000 rows since Triton 3.7.1, which is not measured.
"""

LONGEST_SECONDS = 800
"""Time limit of one process; an idle machine needs a minute or two."""

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(LONGEST_SECONDS + 60),
]


def run(arguments: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    return done.stdout


LONG_FILES = {
    "test_lossless": ("qwen3_5", "mamba2", "falcon_mamba", "deepseek_v2"),
    "test_mixed_graphs": ("qwen3_5", "lfm2", "gpt_oss", "gemma2"),
}
"""Files whose families are cases of their own, because each takes minutes."""
FILES = [
    pytest.param(path, keyword, id=f"{path.stem}-{keyword}" if keyword else path.stem)
    for path in sorted((HERE / "triton").glob("test_*.py"))
    for keyword in LONG_FILES.get(path.stem, ("",))
]


def test_long_files_have_cases_for_all_their_families() -> None:
    for stem, keywords in LONG_FILES.items():
        (families,) = re.findall(r'parametrize\("family", (\[.*\])\)', (HERE / "triton" / f"{stem}.py").read_text())
        assert all(any(each in family for each in keywords) for family in json.loads(families))


@pytest.mark.parametrize(("path", "keyword"), FILES)
def test_triton_tests_pass_under_interpreter(path: Path, keyword: str) -> None:
    # The interpreter multiplies with numpy, whose OpenBLAS on some CPUs (AMD's Zen) sums a row in another order in
    # another number of rows. On this kind it does not.
    environment = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Sandybridge"}
    output = run(["pytest", "-q", "-p", "no:cacheprovider", str(path), "-k", keyword], environment)
    assert " passed" in output
    assert "skipped" not in output


OTHERS = (80, 86, 89, 100, 120) if os.environ.get("TEST_ALL_GPUS") else (80, 120)
"""Compute capabilities other than an H100's, 90. Each takes minutes: set TEST_ALL_GPUS=1 for a change of the kernels.
"""
PARTS = {
    "attention": {"attend", "attend_splits"},
    "experts": {"multiply_experts"},
    "latents": {"attend_latents", "attend_latent_splits", "attend_expanded"},
    "products": {"multiply_weight_only"},
    "recurrences": CHUNKS,
    "rows": {"pick_tokens", "gather_candidates", "_norm_rope_store_kernel", "_norm_kernel"},
}
"""Parts of what triton/compile_for_gpu.py compiles, each a case because all take minutes; and some kernels of each."""


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, int], Future[str]]]:
    """The output of the compiler for each case. One compilation uses one core, so several run in parallel."""
    if find_spec("triton.backends.nvidia") is None:
        pytest.skip("this Triton has no compiler for NVIDIA GPUs")
    chosen = {item.name.partition("[")[2] for item in request.session.items}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        module, environment = "tests.kernels.triton.compile_for_gpu", {"TRITON_INTERPRET": "0"}
        yield {
            (part, each): pool.submit(
                run, [module, str(tmp_path_factory.mktemp("compiled")), str(each), part], environment
            )
            for part in PARTS
            for each in (90, *OTHERS)
            if f"{part}-{each}]" in chosen
        }
        pool.shutdown(cancel_futures=True)


def assert_norms_sum_alike(kernels: list[dict[str, Any]]) -> None:
    """Norms add a row in one order, whether they round it to 8 bits or not."""
    alone, rounding = (
        {kernel["first_sum"] for kernel in kernels if kernel["name"] == name and kernel["dtype"] == "bf16"}
        for name in ("_norm_kernel", "norm_rounded")
    )
    assert len(alone) == 2, "two numbers of warps"
    assert rounding == alone


@pytest.mark.parametrize("capability", [90, *OTHERS])
@pytest.mark.parametrize("part", PARTS)
def test_kernels_compile_for_gpus(compiled: dict[tuple[str, int], Future[str]], part: str, capability: int) -> None:
    """The kernels compile once. On an H100 they spill almost nothing, and attention uses tensor cores and asynchronous
    copies. Elsewhere they fit into the shared memory of the smallest GPU, and those of chunks into that of their own.
    """
    *kernels, last = [json.loads(line) for line in compiled[part, capability].result().splitlines()]
    assert last == {"compiled_anew": 0}
    assert {kernel["name"] for kernel in kernels} >= PARTS[part]
    for kernel in kernels:
        if capability == 90:
            assert kernel["spilled"] <= ON_HOPPER.get(kernel["name"], 16), kernel
            assert kernel["shared"] <= OF_AN_H100, kernel
        else:
            in_chunks = kernel["name"] in CHUNKS
            assert kernel["spilled"] <= (0 if in_chunks else MOST_SPILLED), kernel
            assert kernel["shared"] <= (OF_AN_H100 if in_chunks and capability == 100 else SHARED_MEMORY), kernel
    attends = [kernel for kernel in kernels if kernel["name"].startswith("attend") and kernel["dtype"] == "bf16"]
    if part in ("attention", "latents"):
        assert len(attends) > 20
    for kernel in attends if capability == 90 else []:
        code = kernel["code"]
        assert code["HGMMA"] + code["HMMA"] > 0, kernel
        assert code["LDGSTS"] > 0, kernel
    if part == "rows":
        assert_norms_sum_alike(kernels)
