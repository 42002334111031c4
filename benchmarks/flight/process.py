"""The stages of a flight: in which order they run, each in a process that is watched and ended with all that it
started, and the table of what they found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Run:
    stage: str
    again: str
    """How it was run once more; "": the first time."""
    ended: str
    """Why it did not end well; "": it did."""
    seconds: float

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
    return Run("", "", f"its {seconds:.0f} s were over" if code is None else _reason(code, log), took)


def _reason(code: int, log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "it printed nothing"
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return f"{how}: {last[:300]}"


PLAN = {
    "machine": 40.0,
    "kernels": 120.0,
    "products": 50.0,
    "models": 110.0,
    "images": 60.0,
    "large": 110.0,
    "http": 60.0,
    "cores": 30.0,
}
"""Together as long as a flight; what one leaves goes to second runs."""


def told(runs: Iterable[Run], out: Path) -> str:
    """What each stage found, line by line, with what failed first above all."""
    runs = list(runs)
    lines = []
    first = next((run for run in runs if not run.held), None)
    wrong = [(run.stage, each) for run in runs if not run.again for each in read(out, run) if not each["held"]]
    if first is not None:
        lines.append(f"FIRST TO FAIL: {first.stage}: {first.ended}")
    lines += [f"DOES NOT HOLD: {stage}: {each['what']}: {each['said']}" for stage, each in wrong]
    lines += [] if lines else ["everything holds"]
    for run in runs:
        name = f"{run.stage} ({run.again})" if run.again else run.stage
        lines.append(f"\n{name}: {'held' if run.held else run.ended}; {run.seconds:.0f} s")
        for each in read(out, run):
            lines.append(f"  {'ok ' if each['held'] else 'NO '} {each['what']:<58} {each['said']}")
    return "\n".join(lines) + "\n"


def read(out: Path, run: Run) -> list[dict[str, Any]]:
    """What a run wrote; a line that its death cut off is left out."""
    path = out / (f"{run.stage}.{run.again}.jsonl" if run.again else f"{run.stage}.jsonl")
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
