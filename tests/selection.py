"""Which tests run when; DEVELOPERS.md tells the kinds.

`@pytest.mark.few(n)`: of a test's cases n run with every change, spread over all of them, the first among them; the
others at night.
`--slice K/N`: one part of N of what else was chosen, by files' names.
`--begin-within S`: no test begins later than S seconds after the first.
Whoever ends a run by SIGTERM is told which tests were running.
"""

from __future__ import annotations

import signal
import time
import zlib
from collections import Counter, defaultdict
from types import FrameType

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("quire")
    group.addoption("--slice", metavar="K/N", help="the K-th of N parts of the files with chosen tests")
    group.addoption("--begin-within", type=float, metavar="S", help="seconds after which no further test begins")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before -m looks at the marks."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("few")
        assert mark is not None
        kept = set(spread(len(cases), *mark.args))
        for i, item in enumerate(cases):
            if i not in kept:
                item.add_marker(pytest.mark.nightly)


def spread(cases: int, few: int) -> list[int]:
    """`few` places among `cases`, the first among them, at most all."""
    return sorted({i * (cases - 1) // max(few - 1, 1) for i in range(few)})


def part_of(file: str, count: int) -> int:
    """Which of `count` parts, from 1 on, a file belongs to."""
    return zlib.crc32(file.encode()) % count + 1


class Slice:
    """After -m and -k have chosen. A file's part depends on its name alone: --last-failed finds it there again."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        number, count = map(int, config.getoption("--slice").split("/"))
        here = [item for item in items if part_of(item.nodeid.partition("::")[0], count) == number]
        others = set(items) - set(here)
        config.hook.pytest_deselected(items=[item for item in items if item in others])
        items[:] = here

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        """Says what ran, by files."""
        ended = [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])]
        files = Counter(report.nodeid.partition("::")[0] for report in ended)
        ran = ", ".join(f"{file} ({count})" for file, count in sorted(files.items()))
        terminalreporter.write_line(f"slice {config.getoption('--slice')}: {ran}")


class Hurry:
    """Skips what would begin too late."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.reason = f"the {seconds:.0f} s of --begin-within were over"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.end:
            pytest.skip(self.reason)


class Running:
    """The tests that have begun and not ended, also those in pytest-xdist's processes."""

    def __init__(self) -> None:
        self.tests: dict[str, None] = {}

    @pytest.hookimpl(tryfirst=True)  # before anybody says that it has begun
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tests[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tests.pop(nodeid, None)

    def end(self, number: int, frame: FrameType | None) -> None:
        pytest.exit(f"ended by SIGTERM during {', '.join(self.tests) or 'no test'}", returncode=124)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slice"):
        config.pluginmanager.register(Slice())
    if seconds := config.getoption("--begin-within"):
        config.pluginmanager.register(Hurry(seconds))
    if not hasattr(config, "workerinput"):  # this is no process of pytest-xdist's, which does not hear of all tests
        running = Running()
        config.pluginmanager.register(running)
        signal.signal(signal.SIGTERM, running.end)
