"""`make mutants`: which faults it draws, and how it reports them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import coverage
import pytest

from tests.golden.tree import Tree
from tests.mutants.coverage_map import CoverageMap, measure
from tests.mutants.draw import draw, read_equivalents, room_of
from tests.mutants.faults import Fault, is_valid, statements_of
from tests.mutants.runs import Copy, bounded, diff_of
from tests.tree import ROOT

LIMITS = """
def is_adult(age):
    return age >= 18


def is_senior(age):
    return age >= 65


def never_called():
    return 1
"""
TESTS = """
import pytest
from tiny.limits import is_adult, is_senior


@pytest.mark.parametrize("age", [17, 18])
def test_adults(age):
    assert is_adult(age) == (age > 17)


def test_seniors():
    assert not is_senior(20)
"""


def faults_of(source: str) -> list[Fault]:
    return [fault for each in statements_of("module.py", source) for fault in each.faults]


def changes_of(source: str) -> set[str]:
    """Changed lines, one for each fault."""
    return {fault.lines(source)[1] for fault in faults_of(source) if is_valid(fault, source)}


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a not in b", {"x = a in b"}),
        ("x = a is not b", {"x = a is b"}),
        ("x = (a) - (b)", {"x = (a) + (b)"}),
        ("x = a and b or c", {"x = a or b or c", "x = a and b and c"}),
        ("x = not a", {"x = a"}),
        ("x = a if b else c", {"x = a if True else c", "x = a if False else c"}),
        ("x = [a for a in b if a]", {"x = [a for a in b if True]", "x = [a for a in b if False]"}),
        ("x = 3", {"x = 4"}),
        ("x = 0.5", {"x = 1.0"}),
        ("x = True", {"x = False"}),
        ("x = 'stop'", {"x = 'stopx'"}),
        ("f(a, key=b)", {"f(a)", "pass"}),
        ("x = f(key=b, other=c)", {"x = f(other=c)", "x = f(key=b)"}),
        ("x = a.get(b, c)", {"x = a.get(b)"}),
        ("self.x = a", {"pass"}),
        ("x += a", {"x -= a", "pass"}),
        ("raise Refused('no such file', param=a)", {"raise Refused('no such file')", "pass"}),
        ("while a: f", {"while False: f"}),
    ],
)
def test_statement_becomes_each_of_its_faults(line: str, changes: set[str]) -> None:
    assert changes_of(line) == changes


@pytest.mark.parametrize(
    ("returns", "changes"),
    [
        ("bool", {"return not (f(x))"}),
        ("int", {"return (f(x)) + 1"}),
        ("list[str]", {"return []"}),
        ("Thing", {"return None"}),
    ],
)
def test_return_is_replaced_by_a_value_of_its_type(returns: str, changes: set[str]) -> None:
    assert changes_of(f"def g(x) -> {returns}:\n    return f(x)") == changes


def test_awaited_cleanup_and_handler_are_removed() -> None:
    source = "async def g(x):\n    try:\n        await x.close()\n    except OSError:\n        f(x)\n"
    assert changes_of(source) == {"pass", "except ():"}


@pytest.mark.parametrize(
    "source",
    [
        '"""A module of 3 < 4."""',
        "x: Literal['a', 'b']",
        "def f(x: int = 3) -> Literal[3]: ...",
        "x = cast('Literal[3]', y)",
        "x = isinstance(y, int | None)",
        "Kind = Literal['a', 'b']",
        "Size = int | None",
        "__all__ = ['x']",
        "if TYPE_CHECKING:\n    x = 3",
        "log.warning('%d of %d', 3, 4)",
        "self._log.info('done', extra=3)",
        "x = 'two words'",
        "x = f'{a < b}'",
        "x = Field(description='x')",
        "assert x < 3",
        "@triton.jit\ndef f(x):\n    return x + 1",
    ],
)
def test_what_is_no_behavior_has_no_faults(source: str) -> None:
    assert faults_of(source) == []


def test_message_of_an_exception_has_no_faults() -> None:
    assert changes_of("raise ValueError('negative')") == {"pass"}


def test_statement_runs_at_import_when_no_function_holds_it() -> None:
    source = "x = 1\nclass A:\n    y = 2\n    def f(self):\n        z = 3\n        class B:\n            w = 4\n"
    statements = statements_of("module.py", source)
    assert [(each.lines.start, each.runs_at_import) for each in statements] == [
        (1, True),
        (3, True),
        (5, False),
        (7, False),
    ]


def test_drawing_is_the_same_for_equal_seeds_and_spreads_over_rooms() -> None:
    sources = {f"quire/server/{room}/a.py": f"x = {'1 + ' * 3}1\n" * 20 for room in ("first", "second")}
    statements = [each for file, source in sources.items() for each in statements_of(file, source)]
    one, same, other = (draw(statements, 10, seed, sources.__getitem__) for seed in (1, 1, 2))
    assert one == same != other
    assert [room_of(fault.file) for fault in one] == ["server/first"] * 5 + ["server/second"] * 5
    assert len({(fault.file, fault.line) for fault in one}) == 10


def test_tests_are_bounded_in_number_and_seconds() -> None:
    many = {f"test_{i}": 0.1 for i in range(1000)}
    assert 1 < len(bounded([*many], many)) < 1000
    long = {"test_a": 1000.0, "test_b": 1000.0}
    assert bounded([*long], long) == ["test_a"]


def test_covering_tests_are_ordered_by_nearness_then_cases_then_seconds(tmp_path: Path) -> None:
    data = coverage.CoverageData(str(tmp_path / "measured"))
    seconds = {
        "checks/server/room/test_module.py::test_slow": 2.0,
        "checks/server/room/test_other.py::test_many[a]": 0.1,
        "checks/server/room/test_other.py::test_one": 0.5,
        "checks/server/room/test_other.py::test_many[b]": 0.2,
        "checks/server/hall/test_hall.py::test_fast": 0.01,
        "checks/e2e/test_all.py::test_in_another_process": 0.01,
    }
    for context in (*list(seconds)[:-1], "", "checks/e2e/test_all.py"):
        data.set_context(context)
        data.add_lines({"/tree/package/server/room/module.py": [1] if context == "" else [5]})
    data.write()
    (tmp_path / "root").write_text("/tree")
    (tmp_path / "tests.json").write_text(json.dumps({**seconds, "checks/server/room/test_other.py::test_else": 0.1}))
    measured = CoverageMap(tmp_path)
    assert measured.lines("package/server/room/module.py") == {1, 5}
    assert measured.tests("package/server/room/module.py", [4, 5]) == [*seconds]
    assert measured.tests("package/server/room/module.py", [1]) == [], "only an import ran it"
    assert measured.tests("package/server/room/unknown.py", [1]) == []


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "tree"
    for folder in ("tiny", "tests", "tests/mutants"):
        (root / folder).mkdir(parents=True)
        (root / folder / "__init__.py").touch()
    shutil.copy(ROOT / "tests/mutants/recorder.py", root / "tests/mutants")
    (root / "tiny/limits.py").write_text(LIMITS)
    (root / "tests" / "test_limits.py").write_text(TESTS)
    (root / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    return Tree("tiny", root)


@pytest.mark.slow
def test_fault_is_killed_where_a_test_notices_it(tiny: Tree, tmp_path: Path) -> None:
    measure(tiny, "tiny", ["tests"], tmp_path / "map")
    measured = CoverageMap(tmp_path / "map")
    by_mutation = {
        fault.lines(LIMITS)[1]: fault for each in statements_of("tiny/limits.py", LIMITS) for fault in each.faults
    }
    copy = Copy(tiny, tmp_path / "copy")

    def outcome(mutation: str) -> str:
        fault = by_mutation[mutation]
        tests = measured.tests("tiny/limits.py", [fault.line])
        assert len(tests) == mutation.count("18") * 2 + mutation.count("65")
        return str(copy.run(fault, tests, 1.0)["status"])

    try:
        assert outcome("return age > 18") == "killed"
        assert outcome("return age > 65") == "survived", "no test is of 65 years"
        assert outcome("return age < 65") == "killed"
        assert copy.run(by_mutation["return age > 65"], ["tests::test_gone"], 1.0)["status"] == "error"
    finally:
        copy.close()
    never_called = LIMITS.splitlines().index("    return 1") + 1
    assert never_called not in measured.lines("tiny/limits.py")
    assert (tiny.root / "tiny/limits.py").read_text() == LIMITS


def test_diff_changes_one_line() -> None:
    fault = next(each for each in statements_of("tiny/limits.py", LIMITS)[0].faults if each.replacement == ">")
    diff = diff_of(fault, LIMITS)
    assert diff.startswith("--- a/tiny/limits.py\n+++ b/tiny/limits.py\n")
    assert "-    return age >= 18\n+    return age > 18\n" in diff


def test_equivalents_name_what_is_there() -> None:
    for each in read_equivalents():
        source = (ROOT / each.file).read_text()
        faults = (fault for statement in statements_of(each.file, source) for fault in statement.faults)
        assert any(each.is_of(fault, source) for fault in faults), f"{each.file}: {each.line} is no more"
        assert each.reason
