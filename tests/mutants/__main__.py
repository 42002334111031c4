"""Puts faults into quire/, one at a time, and runs the tests that cover each: `make mutants`.

What no test notices is printed as a diff. Exit status: 0 if there is no such fault, otherwise 1. The commit is tried,
not what is not committed. Which tests cover which lines is measured once for a commit and kept in .mutants.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from tests.golden.tree import Tree, check_out
from tests.mutants.coverage_map import CoverageMap, measure
from tests.mutants.draw import draw, read_equivalents, room_of
from tests.mutants.faults import Fault, Statement, statements_of
from tests.mutants.runs import Copy, bounded, diff_of
from tests.tree import ROOT

PACKAGE = "quire"
KEPT = ROOT / ".mutants"
OPTIONS = ("--hypothesis-seed=0", "--timeout=60")
PRELOADED = (
    "torch",
    "numpy",
    "fastapi",
    "httpx",
    "hypothesis",
    "schemathesis",
    "jinja2",
    "pydantic",
    "tokenizers",
    "zmq",
)
COLUMNS = ("drawn", "killed", "survived", "equivalent", "no test", "error")

Result = dict[str, object]


def main() -> int:
    arguments = _arguments()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    name = commit[:12] + (f"-{zlib.crc32(' '.join(arguments.tests).encode()):08x}" if arguments.tests else "")
    work = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        tree = check_out(commit.strip(), work / "tree")
        if not (KEPT / name / "root").exists():
            shutil.rmtree(KEPT / name, ignore_errors=True)
            measure(tree, PACKAGE, arguments.tests, KEPT / name, arguments.jobs)
        session = Session(tree, CoverageMap(KEPT / name), arguments.paths)
        again = arguments.again and [json.loads(line) for line in arguments.again.read_text().splitlines()]
        faults = session.find(again) if again else session.draw(arguments.count, arguments.seed)
        file = KEPT / f"{name}-{'again' if again else f'seed{arguments.seed}-{arguments.count}'}.jsonl"
        results = session.run(faults, file, arguments.jobs, work, resume=arguments.resume)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(session.report(results))
    return 1 if any(each["status"] == "survived" for each in results) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200, help="faults to draw")
    parser.add_argument("--paths", nargs="*", default=[], help="files and folders of quire/ to draw from; default: all")
    parser.add_argument("--tests", nargs="*", default=[], help="tests to measure and run; default: those of make test")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--resume", action="store_true", help="keep the results of a run that was cut")
    parser.add_argument("--again", type=Path, help="results: try what survived there once more")
    return parser.parse_args()


class Session:
    """One commit, what its tests cover, and the part of it that is of interest."""

    def __init__(self, tree: Tree, coverage: CoverageMap, paths: Sequence[str]) -> None:
        self._tree = tree
        self._coverage = coverage
        self._paths = [path.rstrip("/") for path in paths] or [PACKAGE]
        self._statements = {file: statements_of(file, self.source_of(file)) for file in self._files()}
        self._equivalents = read_equivalents()

    def _files(self) -> list[str]:
        files = sorted(str(path.relative_to(self._tree.root)) for path in (self._tree.root / PACKAGE).rglob("*.py"))
        return [file for file in files if any(file == each or file.startswith(f"{each}/") for each in self._paths)]

    @cache  # noqa: B019 - one session a process
    def source_of(self, file: str) -> str:
        return (self._tree.root / file).read_text(encoding="utf-8")

    def draw(self, count: int, seed: int) -> list[Fault]:
        covered = [each for file, statements in self._statements.items() for each in self._covered(file, statements)]
        return draw(covered, count, seed, self.source_of)

    def _covered(self, file: str, statements: Iterable[Statement]) -> list[Statement]:
        lines = self._coverage.lines(file)
        return [each for each in statements if not lines.isdisjoint(each.lines)]

    def find(self, results: Iterable[Result]) -> list[Fault]:
        """The faults of an earlier run that survived, wherever their lines are now."""
        wanted = {_key(each) for each in results if each["status"] == "survived"}
        faults = (fault for file in self._files() for each in self._statements[file] for fault in each.faults)
        return list(
            {_key(self._describe(fault)): fault for fault in faults if _key(self._describe(fault)) in wanted}.values()
        )

    def run(self, faults: Sequence[Fault], file: Path, jobs: int, work: Path, *, resume: bool) -> list[Result]:
        """The results, each of which is written at once."""
        done = [json.loads(line) for line in file.read_text().splitlines()] if resume and file.exists() else []
        keys = {_key(each) for each in done}
        left = [fault for fault in faults if _key(self._describe(fault)) not in keys]
        copies: SimpleQueue[Copy] = SimpleQueue()
        with ExitStack() as stack:
            for i in range(min(jobs, len(left))):
                copies.put(stack.enter_context(closing(Copy(self._tree, work / f"copy{i}", OPTIONS, PRELOADED))))
            output = stack.enter_context(file.open("a" if done else "w", encoding="utf-8"))
            threads = stack.enter_context(ThreadPoolExecutor(jobs))
            for future in as_completed([threads.submit(self._try, fault, copies) for fault in left]):
                result = future.result()
                done.append(result)
                output.write(json.dumps(result, ensure_ascii=False) + "\n")
                output.flush()
                progress = f"{len(done)}/{len(faults)} {result['status']} {result['file']}:{result['line']}"
                print(f"{progress} {result['operator']}", flush=True)
        return done

    def _try(self, fault: Fault, copies: SimpleQueue[Copy]) -> Result:
        source = self.source_of(fault.file)
        result = self._describe(fault)
        if reason := next((each.reason for each in self._equivalents if each.is_of(fault, source)), None):
            return result | {"status": "equivalent", "reason": reason}
        tests = self._coverage.tests(fault.file, self._lines_that_notice(fault))
        if not tests:
            return result | {"status": "no test"}
        chosen = bounded(tests, self._coverage.seconds)
        copy = copies.get()
        try:
            outcome = copy.run(fault, chosen, sum(self._coverage.seconds[test] for test in chosen))
        finally:
            copies.put(copy)
        result |= {"tests": len(chosen), "tests_left_out": len(tests) - len(chosen), **outcome}
        return result | ({"ran": chosen, "diff": diff_of(fault, source)} if outcome["status"] == "survived" else {})

    def _lines_that_notice(self, fault: Fault) -> set[int]:
        """The statement's; of one that runs when the module is imported, by whomever, those of all functions."""
        statements = self._statements[fault.file]
        statement = next(each for each in statements if fault in each.faults)
        if not statement.runs_at_import:
            return {*statement.lines}
        return {line for each in statements if not each.runs_at_import for line in each.lines}

    def _describe(self, fault: Fault) -> Result:
        line, mutated = fault.lines(self.source_of(fault.file))
        place = {"file": fault.file, "line": fault.line, "function": fault.function}
        return place | {"operator": fault.operator, "text": line, "mutated": mutated}

    def report(self, results: Sequence[Result]) -> str:
        """Survivors, then a table of rooms."""
        parts = []
        for each in results:
            if each["status"] == "survived":
                tests: list[str] = each["ran"]  # type: ignore[assignment]
                more = f", {each['tests_left_out']} more were not run" if each["tests_left_out"] else ""
                names = "\n".join(f"# {test}" for test in tests[:10])
                parts.append(
                    f"\n{each['operator']} in {each['function'] or 'the module'} survived {len(tests)} tests{more}"
                )
                parts.append(f"{names}\n{each['diff']}")
        counts: dict[str, Counter[str]] = {}
        for each in results:
            room = counts.setdefault(room_of(str(each["file"])), Counter())
            room.update(["drawn", str(each["status"])])
        for file, statements in self._statements.items():
            if room_of(file) in counts:
                covered = Counter(statements=len(statements), covered=len(self._covered(file, statements)))
                counts[room_of(file)].update(covered)
        parts.append(f"{'room':28}" + "".join(f"{each:>11}" for each in (*COLUMNS, "covered")))
        for room, numbers in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
            share = f"{numbers['covered'] / max(numbers['statements'], 1):.0%}"
            parts.append(f"{room:28}" + "".join(f"{numbers[each]:>11}" for each in COLUMNS) + f"{share:>11}")
        return "\n".join(parts)


def _key(result: Result) -> tuple[object, ...]:
    return tuple(result[each] for each in ("file", "function", "operator", "text", "mutated"))


if __name__ == "__main__":
    sys.exit(main())
