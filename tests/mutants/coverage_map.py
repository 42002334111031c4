"""Which tests run which line of a tree."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import coverage

from tests.golden.tree import Tree
from tests.mutants.recorder import DURATIONS, TEST_FILE
from tests.mutants.runs import PYTEST_OPTIONS

_CONFIG = f"""
[run]
core = ctrace
parallel = true
patch = _exit, fork
source = {{root}}/{{package}}
data_file = {{folder}}/measured
context = ${{{{{TEST_FILE}-}}}}
disable_warnings = no-data-collected, module-not-measured, module-not-imported
"""


_REST_SECONDS = 10.0
"""In which processes that end with pytest write what they measured."""


class CoverageMap:
    """Reads what `measure` has written into the folder."""

    def __init__(self, folder: Path) -> None:
        self._data = coverage.CoverageData(str(folder / "measured"))
        self._data.read()
        self._root = (folder / "root").read_text(encoding="utf-8")
        self.seconds: dict[str, float] = json.loads((folder / "tests.json").read_text(encoding="utf-8"))
        self._tests_of_file: dict[str, list[str]] = defaultdict(list)
        for test in self.seconds:
            self._tests_of_file[test.partition("::")[0]].append(test)

    def lines(self, file: str) -> set[int]:
        """The lines that ran, be it while the module was imported."""
        return set(self._data.lines(f"{self._root}/{file}") or ())

    def tests(self, file: str, lines: Iterable[int]) -> list[str]:
        """Tests that passed and ran one of the lines; then those of files of which some test did so in another process.
        See `_nearest_first` for the order.
        """
        by_line = self._data.contexts_by_lineno(f"{self._root}/{file}")
        contexts = {context for line in lines for context in by_line.get(line, ())}
        tests = contexts & self.seconds.keys()
        files = contexts & self._tests_of_file.keys()
        others = {test for each in files for test in self._tests_of_file[each]} - tests
        return self._nearest_first(file, tests) + self._nearest_first(file, others)

    def _nearest_first(self, file: str, tests: Collection[str]) -> list[str]:
        """Tests of the module, of its room, others; in each of these, one case of every test before the second cases of
        any, cheapest first. The cheapest of all are mostly many cases of one test that has to do with something else.
        """
        num_cases: Counter[str] = Counter()
        keys = {}
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            name = test.partition("[")[0]
            num_cases[name] += 1
            keys[test] = (_distance(file, test), num_cases[name], self.seconds[test])
        return sorted(keys, key=keys.__getitem__)


def _distance(file: str, test: str) -> int:
    """0: the test's file is named for the module; 1: it is in the folder of the module's; 2: neither."""
    module, test_file = PurePosixPath(file), PurePosixPath(test.partition("::")[0])
    if test_file.name == f"test_{module.name}":
        return 0
    return 1 if test_file.parent.parts[1:] == module.parent.parts[1:] else 2


def measure(tree: Tree, package: str, tests: Sequence[str], folder: Path, jobs: int = 1) -> None:
    """Run tests of the tree and write into `folder` which lines of the package each of them runs.

    A process that is killed loses what it measured, as body workers are.
    """
    folder.mkdir(parents=True)
    config = folder / "coveragerc"
    config.write_text(_CONFIG.format(root=tree.root, package=package, folder=folder), encoding="utf-8")
    variables = {"COVERAGE_PROCESS_START": str(config), DURATIONS: str(folder / "tests.json"), TEST_FILE: ""}
    spread = ("--numprocesses", str(jobs), "--dist", "loadfile") if jobs > 1 else ()
    options = (*PYTEST_OPTIONS, "-p", "tests.mutants.recorder", "-m", "not slow", *spread)
    command = [sys.executable, "-m", "pytest", *options, *tests]
    process = subprocess.Popen(command, cwd=tree.root, env=tree.environment | variables, start_new_session=True)
    try:
        process.wait()
        _wait_for_group(process.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    measured = coverage.Coverage(config_file=str(config))
    measured.combine([str(folder)])
    measured.save()
    for rest in folder.glob("measured.*"):  # of processes that were killed while they wrote
        rest.unlink()
    (folder / "root").write_text(str(tree.root), encoding="utf-8")


def _wait_for_group(process_group: int) -> None:
    deadline = time.monotonic() + _REST_SECONDS
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process_group, 0)
            time.sleep(0.05)
