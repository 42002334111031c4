"""Which tests run when, and what a run says that is ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import spread
from tests.tree import ROOT

MANY = """
import pytest

@pytest.mark.few(2)
@pytest.mark.parametrize("number", range(5))
def test_matrix(number): pass

@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("number", range(3))
def test_slow(number): pass

def test_alone(): pass
"""
HANGING = """
import threading

def test_before(): pass

def test_that_hangs(): threading.Event().wait()
"""
MARKERS = "-o", "markers=slow\nnightly\nfew(n)"


def command(folder: Path, *options: str) -> list[str]:
    own = ("-p", "tests.selection", "-p", "no:cacheprovider", "-c", "/dev/null", *MARKERS, "--rootdir", str(folder))
    return [sys.executable, "-m", "pytest", *own, *options, str(folder)]


def run(folder: Path, *options: str) -> str:
    return subprocess.run(command(folder, *options), cwd=ROOT, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize(("cases", "few"), [(5, 1), (5, 2), (5, 5), (3, 7), (1, 1), (100, 9)])
def test_few_are_spread(cases: int, few: int) -> None:
    places = spread(cases, few)
    assert places[0] == 0
    assert places[-1] < cases
    assert len(places) == min(cases, few)
    assert few == 1 or places[-1] == cases - 1


@pytest.mark.slow
def test_each_test_runs_by_one_of_three_commands(tmp_path: Path) -> None:
    (tmp_path / "test_many.py").write_text(MANY)
    assert "3 passed, 6 deselected" in run(tmp_path, "-m", "not slow and not nightly")
    assert "3 passed, 6 deselected" in run(tmp_path, "-m", "slow and not nightly")
    assert "3 passed, 6 deselected" in run(tmp_path, "-m", "nightly")


@pytest.mark.slow
def test_slices_are_disjoint_and_say_what_they_ran(tmp_path: Path) -> None:
    for name in "abcde":
        (tmp_path / f"test_{name}.py").write_text(MANY)
    said = [run(tmp_path, "-m", "slow", "--slice", f"{part}/2") for part in (1, 2)]
    ran = [set(re.findall(r"test_.\.py \(3\)", each.partition("\nslice ")[2])) for each in said]
    assert all(ran)
    assert not ran[0] & ran[1]
    assert len(ran[0] | ran[1]) == 5


@pytest.mark.slow
def test_what_failed_in_a_slice_is_tried_again_in_it(tmp_path: Path) -> None:
    for name in "abcde":
        (tmp_path / f"test_{name}.py").write_text(
            "def test_that_fails(): assert False\n\ndef test_that_passes(): pass\n"
        )
    for part in ("1/2", "2/2"):
        options = ("--slice", part, "-p", "cacheprovider", "-o", f"cache_dir={tmp_path / 'cache'}")
        failed = re.search(r"\d failed", run(tmp_path, *options))
        assert failed
        assert f"= {failed[0]}" in run(tmp_path, *options, "--last-failed")


@pytest.mark.slow
def test_none_begins_when_the_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "test_many.py").write_text(MANY)
    assert "9 skipped" in run(tmp_path, "--begin-within", "1e-9")
    assert "9 passed" in run(tmp_path, "--begin-within", "100")


@pytest.mark.slow
@pytest.mark.parametrize("spread_over", [(), ("--numprocesses", "1")], ids=["alone", "xdist"])
def test_a_run_that_is_ended_names_the_test_that_is_running(tmp_path: Path, spread_over: tuple[str, ...]) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    with subprocess.Popen(
        command(tmp_path, "-v", *spread_over), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            said = ""
            while "::test_that_hangs" not in said:  # the process that runs it, another with xdist, has told of it
                said += (line := os.read(process.stdout.fileno(), 1 << 16).decode())
                assert line, said
            process.send_signal(signal.SIGTERM)
            said += process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert process.returncode == 124, said
    assert "ended by SIGTERM during test_hanging.py::test_that_hangs" in said
