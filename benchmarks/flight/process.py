"""One stage's process: begun, watched, and ended with all that it started; and what runs beside all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Run:
    stage: str
    again: str
    """How it was run once more; "": the first time."""
    ended: str
    """Why it did not end well; "": it did."""
    seconds: float
    late: bool = False
    """Its time was over: run again it would take as long."""

    @property
    def held(self) -> bool:
        return not self.ended


def run_stage(command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float) -> Run:
    """Run a command in a session of its own, with what it prints in `log`; at its deadline, or when it has ended, all
    processes of the session are killed."""
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took = time.monotonic() - began
    if code == 0:
        return Run("", "", "", took)
    if code is None:
        return Run("", "", f"its {seconds:.0f} s were over", took, late=True)
    return Run("", "", _reason(code, log), took)


@contextmanager
def beside(command: Sequence[str], log: Path) -> Iterator[None]:
    """A command that runs meanwhile, below all others, with what it prints in `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["nice", "-n", "19", *command], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _reason(code: int, log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "it printed nothing"
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return f"{how}: {last[:300]}"
