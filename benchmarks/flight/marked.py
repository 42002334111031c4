"""The tests marked gpu, which need no figures, each file in a process with a deadline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.flight.finding import Finding, Say

_ROOT = Path(__file__).parents[2]
_FIRST = "tests/engine/worker/test_graphs.py"
"""Tests of draft heads' graphs, which no GPU has run yet."""
_TRITON = "tests/kernels/triton"
"""All of its tests are marked, by its conftest.py."""
_FILE_SECONDS = 40.0
_NOTHING_CHOSEN = 5
"""pytest's exit status if no test is chosen."""


def tests(device: torch.device, say: Say) -> None:
    """On a CPU only the smallest file, whose tests are skipped."""
    marked = [path for path in (_ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")]
    if device.type == "cpu":
        marked = [min(marked, key=lambda path: path.stat().st_size)]
    else:
        marked += (_ROOT / _TRITON).glob("test_*.py")
    names = sorted({str(path.relative_to(_ROOT)) for path in marked})
    for name in sorted(names, key=lambda name: (name != _FIRST, name.startswith(_TRITON))):
        say(_run(name))


def _run(name: str) -> Finding:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--no-header", name]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_FILE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Finding(name, f"its {_FILE_SECONDS:.0f} s were over", held=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()] or done.stderr.splitlines() or ["nothing"]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return Finding(name, "; ".join([lines[-1], *failed])[:400], held=done.returncode in (0, _NOTHING_CHOSEN))
