"""The two tiers of tests, and shards of the second.

`make test` runs tests not marked `slow`. `make test-all` runs the rest (`--rest`): tests marked `slow`, and every
hypothesis test again with all its examples. With `@pytest.mark.few(n)`, n of a test's cases run in `make test`, spread
over all and including the first; the others are slow.

`--shard K/N` runs one part of N. A test's name or tests/shards.toml determines its part; a case with
`@pytest.mark.beside(name)` is in the part of that test or file, because the two need the same long preparation.
"""

from __future__ import annotations

import re
import signal
import tomllib
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import hypothesis
import pytest

SHARDS = Path(__file__).with_name("shards.toml")
SLOW_FILE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)
LONGEST = {
    "tests/kernels/test_tiled_machine.py",
    "tests/kernels/test_triton.py",
    "tests/simulation/test_simulation.py",
}
"""Files that begin first: with one of them at the end, a process would run it while the others have nothing to do."""
_rest = False


def runs_rest() -> bool:
    """True in a run of the second tier. Tests that choose their number of cases may run all of them then."""
    return _rest


def examples(count: int) -> int:
    """For hypothesis's `max_examples`: `count` in the second tier, an eighth of it in the first."""
    return count if _rest else max(count // 8, 6)


def slow(*cases: Any) -> list[Any]:
    """Slow cases for parametrize; a tuple is one case of several arguments. If any few cases will do for the first
    tier, use `pytest.mark.few`.
    """
    mark = pytest.mark.slow
    return [
        pytest.param(*case, marks=mark) if isinstance(case, tuple) else pytest.param(case, marks=mark) for case in cases
    ]


def pair_in_rotation(names: Iterable[Any], options: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Cases of two arguments that share no code: each name with one option, each option with some names."""
    return list(zip(names, cycle(options), strict=False))


def pytest_sessionstart() -> None:
    # Hypothesis fails a case that takes 0.2 s and then calls it flaky; on a busy machine any case may take that long.
    hypothesis.settings.register_profile("untimed", deadline=None, max_examples=examples(100))
    hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("quire")
    group.addoption("--rest", action="store_true", help="what `make test` leaves out, with all examples of properties")
    group.addoption("--shard", metavar="K/N", help="the K-th of N parts of what else was chosen")


def leaves_out_slow(config: pytest.Config) -> bool:
    """True in `make test`."""
    return bool(config.getoption("markexpr") == "not slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` does not import files whose tests are all slow: that takes seconds."""
    if collection_path.suffix != ".py" or not leaves_out_slow(config):
        return None
    return bool(SLOW_FILE.search(collection_path.read_text(encoding="utf-8"))) or None


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module, name: str, obj: object) -> list[pytest.Item] | None:
    """`make test` does not create the cases of slow tests, which it would only deselect."""
    if not isinstance(obj, FunctionType) or not name.startswith("test") or not leaves_out_slow(collector.config):
        return None
    return [] if any(mark.name == "slow" for mark in getattr(obj, "pytestmark", ())) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `few` leaves out, before -m reads the marks."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("few")
        assert mark is not None
        first_tier = set(spread(len(cases), *mark.args))
        for i, item in enumerate(cases):
            if i not in first_tier:
                item.add_marker(pytest.mark.slow)


def spread(cases: int, few: int) -> list[int]:
    """Choose `few` of `cases` positions, the first included."""
    return sorted({i * (cases - 1) // max(few - 1, 1) for i in range(few)})


def shard_of(nodeid: str, count: int, table: Mapping[str, int]) -> int:
    """Shard of a test, from 1 to `count`. All cases of a test go to one shard, by its name, so that a new test moves no
    other. All tests of a file in tests/e2e go together, because they share a server. The table assigns files, tests and
    cases that need another shard; with 0 each case goes by its own name, as for a test with many long cases.
    """
    file, test = _file(nodeid), nodeid.partition("[")[0]
    shard = table.get(nodeid, table.get(test, table.get(file)))
    if shard:
        return shard
    unit = nodeid if shard == 0 else file if file.startswith("tests/e2e/") else test
    return zlib.crc32(unit.encode()) % count + 1


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _name_for_shard(item: pytest.Item) -> str:
    mark = item.get_closest_marker("beside")
    return item.nodeid if mark is None else str(mark.args[0])


class Deselecting:
    """Keep part of the collected tests, after -m and -k."""

    def __init__(self, config: pytest.Config) -> None:
        self.rest = bool(config.getoption("--rest"))
        self.shard = config.getoption("--shard")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = set(self._chosen(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = sorted(filter(chosen.__contains__, items), key=lambda item: _file(item.nodeid) not in LONGEST)

    def _chosen(self, items: Iterable[pytest.Item]) -> Iterable[pytest.Item]:
        if self.rest:
            items = [item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("hypothesis")]
        if not self.shard:
            return items
        number, count = map(int, self.shard.split("/"))
        table = tomllib.loads(SHARDS.read_text())
        return [item for item in items if shard_of(_name_for_shard(item), count, table) == number]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what ran, by file."""
        ended = [*terminalreporter.stats.get("passed", []), *terminalreporter.stats.get("failed", [])]
        files = Counter(_file(report.nodeid) for report in ended)
        ran = ", ".join(f"{file} ({count})" for file, count in sorted(files.items()))
        terminalreporter.write_line(f"shard {self.shard or '1/1'}: {ran}")


class Running:
    """Tests that have begun and not ended, including those in pytest-xdist's processes. SIGTERM prints them."""

    def __init__(self) -> None:
        self.tests: dict[str, None] = {}

    @pytest.hookimpl(tryfirst=True)  # before its start is reported
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tests[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tests.pop(nodeid, None)

    def end(self, number: int, frame: FrameType | None) -> None:
        pytest.exit(f"ended by SIGTERM during {', '.join(self.tests) or 'no test'}", returncode=124)


def pytest_configure(config: pytest.Config) -> None:
    global _rest
    _rest = bool(config.getoption("--rest"))
    if config.getoption("--rest") or config.getoption("--shard"):
        config.pluginmanager.register(Deselecting(config))
    if not hasattr(config, "workerinput"):  # not a pytest-xdist worker, which does not see all tests
        running = Running()
        config.pluginmanager.register(running)
        signal.signal(signal.SIGTERM, running.end)
