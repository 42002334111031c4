"""Runs tests on a copy of the tree, with a fault in it or without."""

from __future__ import annotations

import difflib
import json
import os
import re
import select
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

MAX_TESTS = 200
MAX_SECONDS = 120.0
"""Of the tests that run against one fault, as they took without it."""
START_SECONDS = 120.0
"""What a run may take in addition to five times the seconds of its tests."""
ENDED = "no end"
"""What kills a mutant whose tests do not end."""
PYTEST_OPTIONS = ("-q", "-p", "no:cacheprovider")

Outcome = dict[str, object]
"""Its status is killed, survived, or error: the tests do not pass without the fault either."""


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

    def __init__(self, tree: Tree, folder: Path, options: Sequence[str] = (), preloaded: Sequence[str] = ()) -> None:
        """options: of pytest. preloaded: modules that the tests need and that are not the tree's."""
        self._source = tree
        self._tree = Tree(tree.name, folder)
        self._options = options
        self._count = 0
        self._make()
        self._zygote = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("zygote.py")), *preloaded],
            cwd="/",
            env=self._tree.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def close(self) -> None:
        with self._zygote:
            self._zygote.stdin.close()  # type: ignore[union-attr]

    def _make(self) -> None:
        shutil.rmtree(self._tree.root, ignore_errors=True)
        shutil.copytree(self._source.root, self._tree.root, symlinks=True)
        self._listing = self._list_files()

    def run(self, fault: Fault, tests: Sequence[str], seconds: float) -> Outcome:
        """`seconds`: what the tests take without the fault. A test kills only if it passes without the fault."""
        deadline = START_SECONDS + 5 * seconds
        began = time.monotonic()
        with self._with_fault(fault):
            status, output = self._pytest(tests, deadline)
        taken = round(time.monotonic() - began, 1)
        if self._list_files() != self._listing:  # the fault, or what it did to a test, changed the copy
            self._make()
        if status == 0:
            return {"status": "survived", "seconds": taken}
        if status is None:
            return {"status": "killed", "seconds": taken, "by": ENDED}
        # Of a module that can't be imported pytest says the same as of a test that is not there.
        by = re.search(r"^(?:FAILED|ERROR|SUBFAILED\S*) (tests/.*?)(?: - |$)", output, re.MULTILINE)
        killers = [by[1]] if status == 1 and by else tests
        if self._pytest(killers, deadline)[0] != 0:
            return {"status": "error", "seconds": taken, "output": output[-2000:]}
        return {"status": "killed", "seconds": taken, "by": by[1] if by else f"pytest's status {status}"}

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
            output = Path(folder, "output")
            where = ["--rootdir", str(self._tree.root), "--basetemp", f"{folder}/t"]
            arguments = [str(output), str(self._tree.root), *PYTEST_OPTIONS, "-x", *where, *self._options, *tests]
            self._zygote.stdin.write(json.dumps(arguments) + "\n")  # type: ignore[union-attr]
            pid = int(self._read_line())
            in_time = bool(select.select([self._zygote.stdout], [], [], deadline)[0])
            with suppress(ProcessLookupError):  # also what the tests have left running
                os.killpg(pid, signal.SIGKILL)
            status = int(self._read_line())
            return status if in_time else None, output.read_text(encoding="utf-8", errors="replace")

    def _read_line(self) -> str:
        line: str = self._zygote.stdout.readline()  # type: ignore[union-attr]
        return line

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
