from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Run:
    stage: str
    again: str
    """How it ran again, or "" the first time."""
    ended: str
    """Why it failed, or ""."""
    seconds: float
    late: bool = False
    """True if the deadline ended it, so that a second run would not help."""

    @property
    def held(self) -> bool:
        return not self.ended


def run_stage(command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float) -> Run:
    """Runs the command in a session, all of whose processes are killed at the deadline or the command's end."""
    began, code = time.monotonic(), None
    with _session(command, log, environment) as process, suppress(subprocess.TimeoutExpired):
        code = process.wait(seconds)
    took = time.monotonic() - began
    if code == 0:
        return Run("", "", "", took)
    if code is None:
        return Run("", "", f"its {seconds:.0f} s were over", took, late=True)
    return Run("", "", _reason(code, log), took)


def in_order(stages: Mapping[str, float], run: Callable[[str, float], Run]) -> list[Run]:
    """A stage gets its own seconds and what earlier ones left."""
    runs, left = list[Run](), 0.0
    for name, seconds in stages.items():
        runs.append(run(name, seconds + left))
        left = max(0.0, seconds + left - runs[-1].seconds)
    return runs


def is_cudas(run: Run, wrong: Iterable[str]) -> bool:
    """True for a CUDA error or a signal, which appear after their cause: a blocking run or a sanitizer finds that.
    `wrong`: failed findings.
    """
    return not run.held and not run.late and any("CUDA" in said or "killed by" in said for said in (run.ended, *wrong))


def beside(command: Sequence[str], log: Path) -> AbstractContextManager[object]:
    """Runs the command at the lowest priority."""
    return _session(["nice", "-n", "19", *command], log)


@contextmanager
def _session(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _reason(code: int, log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "it printed nothing"
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return f"{how}: {last[:300]}"
