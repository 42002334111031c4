from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.flight.process import Run


def told(runs: Iterable[Run], out: Path) -> str:
    """Seconds count from the stage's start. The first failure is on top."""
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
            lines.append(f"  {'ok ' if each['held'] else 'NO '}{each['at']:5.1f} s  {each['what']:<58} {each['said']}")
    return "\n".join(lines) + "\n"


def read(out: Path, run: Run) -> list[dict[str, Any]]:
    """Leaves out a line cut off by a kill."""
    path = out / (f"{run.stage}.{run.again}.jsonl" if run.again else f"{run.stage}.jsonl")
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
