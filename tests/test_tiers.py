"""Selection of tests by tier and shard, and the output of a terminated run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.tiers import SHARDS, shard_of, spread
from tests.tree import ROOT

MANY = """
import pytest
from hypothesis import given, strategies as st

@pytest.mark.few(2)
@pytest.mark.parametrize("number", range(5))
def test_matrix(number): pass

@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("number", range(3))
def test_slow(number): pass

def test_alone(): pass

@given(st.integers())
def test_property(number): pass
"""
HANGING = """
import threading

def test_before(): pass

def test_that_hangs(): threading.Event().wait()
"""
BESIDE = """
import pytest

@pytest.mark.parametrize("number", [pytest.param(each, marks=pytest.mark.beside("a.py")) for each in range(9)])
def test_many(number): pass
"""
MARKERS = "-o", "markers=slow\nfew(n)\nbeside(name)"


def command(folder: Path, *options: str) -> list[str]:
    own = ("-p", "tests.tiers", "-p", "no:cacheprovider", "-c", "/dev/null", *MARKERS, "--rootdir", str(folder))
    return [sys.executable, "-m", "pytest", *own, *options, str(folder)]


def run(folder: Path, *options: str) -> str:
    return subprocess.run(command(folder, *options), cwd=ROOT, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize(("cases", "few"), [(5, 1), (5, 2), (5, 5), (3, 7), (1, 1), (100, 9)])
def test_spread_picks_evenly_spaced_cases(cases: int, few: int) -> None:
    places = spread(cases, few)
    assert places[0] == 0
    assert places[-1] < cases
    assert len(places) == min(cases, few)
    assert few == 1 or places[-1] == cases - 1


@pytest.mark.slow
def test_each_test_runs_in_one_tier_and_properties_in_both(tmp_path: Path) -> None:
    (tmp_path / "test_many.py").write_text(MANY)
    (tmp_path / "test_all_slow.py").write_text("import pytest\npytestmark = pytest.mark.slow\ndef test_it(): pass\n")
    assert "4 passed, 3 deselected" in run(tmp_path, "-m", "not slow")
    assert "8 passed, 3 deselected" in run(tmp_path, "--rest"), "a property runs in both, with more examples"


@pytest.mark.slow
def test_shards_are_disjoint_and_report_counts_by_file(tmp_path: Path) -> None:
    for name in "abcde":
        (tmp_path / f"test_{name}.py").write_text(MANY)
    outputs = [run(tmp_path, "--rest", "--shard", f"{shard}/2", "-v") for shard in (1, 2)]
    passed = [re.findall(r"(test_\w\.py::\S+) PASSED", each) for each in outputs]
    assert all(passed)
    assert not {*passed[0]} & {*passed[1]}
    assert len({*passed[0], *passed[1]}) == 5 * 7
    for each, names in zip(outputs, passed, strict=True):
        files = Counter(name.partition("::")[0] for name in names)
        counts = dict(re.findall(r"(test_\w\.py) \((\d+)\)", each.partition("\nshard ")[2]))
        assert {file: int(count) for file, count in counts.items()} == files


def test_shard_table_assigns_files_tests_or_single_cases() -> None:
    table = {"a.py": 3, "a.py::test_long": 2, "a.py::test_long[4]": 1, "b.py::test_many": 0}
    assert shard_of("a.py::test_x[1]", 4, table) == 3
    assert shard_of("a.py::test_long[1]", 4, table) == 2
    assert shard_of("a.py::test_long[4]", 4, table) == 1
    assert {shard_of(f"b.py::test_many[{case}]", 4, table) for case in range(50)} == {1, 2, 3, 4}
    assert len({shard_of(f"b.py::test_other[{case}]", 4, table) for case in range(50)}) == 1
    assert len({shard_of(f"tests/e2e/test_curl.py::test_{name}", 4, table) for name in range(50)}) == 1


@pytest.mark.slow
def test_marked_cases_are_in_shard_of_another_file(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(BESIDE)
    of_file = shard_of("a.py", 3, {})
    assert "27 passed" in run(tmp_path, "--shard", f"{of_file}/3")
    assert "27 deselected" in run(tmp_path, "--shard", f"{of_file % 3 + 1}/3")


def test_shard_table_names_existing_tests() -> None:
    numbers = dict(re.findall(r"^(SHARDS|ALL_KERNELS) := (\d+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    table = tomllib.loads(SHARDS.read_text())
    assert table["tests/kernels/conftest.py"] == int(numbers["ALL_KERNELS"]), "all kernels are built for that shard"
    for name, shard in table.items():
        file, _, test = name.partition("[")[0].partition("::")
        assert (ROOT / file).is_file(), name
        assert not test or f"def {test}(" in (ROOT / file).read_text(), name
        assert 0 <= shard < int(numbers["SHARDS"]), f"{name}: the last of these are the clients"


@pytest.mark.slow
@pytest.mark.parametrize("spread_over", [(), ("--numprocesses", "1")], ids=["alone", "xdist"])
def test_terminated_run_names_running_test(tmp_path: Path, spread_over: tuple[str, ...]) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    with subprocess.Popen(
        command(tmp_path, "-v", *spread_over), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            output = ""
            while "::test_that_hangs" not in output:  # the process that runs it, a worker with xdist, has reported it
                output += (line := os.read(process.stdout.fileno(), 1 << 16).decode())
                assert line, output
            process.send_signal(signal.SIGTERM)
            output += process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert process.returncode == 124, output
    assert "ended by SIGTERM during test_hanging.py::test_that_hangs" in output
