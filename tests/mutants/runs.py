"""Runs tests on a copy of the tree, with a fault in it or without."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.golden.tree import Tree
from tests.mutants.faults import Fault

MAX_TESTS = 60
MAX_SECONDS = 60.0
"""Of the tests that run against one fault, as they took without it."""
START_SECONDS = 120.0
"""What a run may take in addition to five times the seconds of its tests."""
ENDED = "no end"
"""What kills a mutant whose tests do not end."""
_OUTCOMES = {0: "survived", 1: "killed"}


def pytest_command() -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def bounded(tests: Sequence[str], seconds: dict[str, float]) -> list[str]:
    """The first of the tests that are within the bounds, at least one."""
    chosen: list[str] = []
    left = MAX_SECONDS
    for test in tests[:MAX_TESTS]:
        left -= seconds[test]
        if chosen and left < 0:
            break
        chosen.append(test)
    return chosen


class Copy:
    """A copy of a tree, in which one fault after the other is put."""

    def __init__(self, tree: Tree, folder: Path, options: Sequence[str] = ()) -> None:
        self._source = tree
        self._tree = Tree(tree.name, folder)
        self._options = options
        self._count = 0
        self._make()

    def _make(self) -> None:
        shutil.rmtree(self._tree.root, ignore_errors=True)
        shutil.copytree(self._source.root, self._tree.root, symlinks=True)
        self._listing = self._list_files()

    def run(self, fault: Fault, tests: Sequence[str], seconds: float) -> dict[str, object]:
        """The outcome: killed or survived, or "error" if the tests do not run without the fault either.

        `seconds`: what the tests take without the fault.
        """
        deadline = START_SECONDS + 5 * seconds
        began = time.monotonic()
        with self._with_fault(fault):
            status, output = self._pytest(tests, deadline)
        taken = round(time.monotonic() - began, 1)
        if self._list_files() != self._listing:  # the fault, or what it did to a test, changed the copy
            self._make()
        outcome = "killed" if status is None else _OUTCOMES.get(status, "")
        if not outcome:  # such as a module that can't be imported: pytest says the same of a test that is not there
            outcome = "error" if self._pytest(tests, deadline)[0] else "killed"
        by = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        killer = ENDED if status is None else by[1] if by else f"pytest's status {status}"
        result: dict[str, object] = {"status": outcome, "seconds": taken}
        if outcome == "killed":
            result["by"] = killer
        elif outcome == "error":
            result["output"] = output[-2000:]
        return result

    @contextmanager
    def _with_fault(self, fault: Fault) -> Iterator[None]:
        path = self._tree.root / fault.file
        source, times = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(fault.apply(source), encoding="utf-8")
        self._count += 1  # bytecode is valid for a second and a size, so no two faults may share them
        os.utime(path, (times.st_atime, times.st_mtime + self._count))
        try:
            yield
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _pytest(self, tests: Sequence[str], deadline: float) -> tuple[int | None, str]:
        """Pytest's status and output; None: it did not end in time."""
        with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as folder:
            command = [*pytest_command(), "-x", "--basetemp", f"{folder}/t", *self._options, *tests]
            output = Path(folder, "output")
            with output.open("wb") as file:
                process = subprocess.Popen(
                    command,
                    cwd=self._tree.root,
                    env=self._tree.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            status: int | None = None
            try:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(deadline)
            finally:
                with suppress(ProcessLookupError):  # also what the tests have left running
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return status, output.read_text(encoding="utf-8", errors="replace")

    def _list_files(self) -> dict[str, tuple[int, int]]:
        """Size and time of each file; not of bytecode and of what tests keep for the next run."""
        listing = {}
        for folder, names, files in os.walk(self._tree.root):
            names[:] = [name for name in names if name != "__pycache__" and not name.startswith(".")]
            for name in files:
                status = os.lstat(os.path.join(folder, name))
                listing[os.path.join(folder, name)] = (status.st_size, status.st_mtime_ns)
        return listing


def diff_of(fault: Fault, source: str) -> str:
    """As `git apply` takes it."""
    old, new = (text.splitlines(keepends=True) for text in (source, fault.apply(source)))
    return "".join(difflib.unified_diff(old, new, f"a/{fault.file}", f"b/{fault.file}"))
