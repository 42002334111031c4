"""A plugin of pytest: tells coverage.py which test runs, and writes down which tests passed and how long each took.

A process that a test starts measures itself, too; it learns from a variable which file's test that was.
"""

from __future__ import annotations

import json
import multiprocessing.forkserver
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

TEST_FILE = "COVERAGE_TEST_FILE"
DURATIONS = "COVERAGE_DURATIONS"
"""Variables: the context of a process that a test starts; where the seconds of tests are written."""


class Recorder:
    """The seconds of each test; those of a test that failed or was skipped are left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = defaultdict(float)
        self._without_result: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if not report.passed:
            self._without_result.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = {
            test: round(seconds, 3) for test, seconds in self._seconds.items() if test not in self._without_result
        }
        self._path.write_text(json.dumps(passed), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # one of pytest-xdist's sees its own tests alone
        config.pluginmanager.register(Recorder(Path(os.environ[DURATIONS])))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    measured = coverage.Coverage.current()
    assert measured is not None, "coverage.py did not start with this process"
    file = item.nodeid.partition("::")[0]
    if os.environ[TEST_FILE] != file:
        os.environ[TEST_FILE] = file
        multiprocessing.forkserver._forkserver._stop()  # one that was started for another file has that one's variables
    measured.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        measured.switch_context("")
