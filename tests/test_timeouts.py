"""A hanging test fails at its timeout, whatever runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
HANGING = """
import asyncio, threading
from hypothesis import given, strategies as st

@given(st.integers())
def test_that_hangs(number):
    threading.Event().wait()

@given(st.integers())
async def test_that_hangs_in_a_loop(number):
    await asyncio.Event().wait()

async def test_without_hypothesis():
    await asyncio.Event().wait()

def test_that_passes():
    assert True
"""


def test_hanging_hypothesis_and_async_tests_fail_at_timeout(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "/dev/null", "-o", "asyncio_mode=auto")
    command = [sys.executable, "-m", "pytest", *options, "--timeout=2", "--rootdir", str(tmp_path), str(tmp_path)]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert "3 failed, 1 passed" in completed.stdout, completed.stdout
    assert completed.stdout.count("TimedOut: Timeout") >= 3, completed.stdout
