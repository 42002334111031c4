"""`python -m benchmarks.flight [--out FOLDER] [--seconds 560] [--device cuda] [--only STAGE ...]`; imports no torch."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.common.options import options
from benchmarks.flight.plan import PLAN
from benchmarks.flight.process import Run, beside, in_order, is_cudas, run_stage
from benchmarks.flight.table import read, told

_BUILD = Path(__file__).parents[2] / "quire" / "kernels" / "cpu" / "build.py"
_LEAST_SECONDS = 5.0
"""A stage needs this much to start."""


def main() -> int:
    args = options(
        __doc__,
        {
            "--out": {"default": Path("flight"), "help": "folder of the results"},
            "--seconds": {"default": 560.0, "help": "of all stages and second runs together"},
            "--device": {"default": "cuda", "choices": ["cuda", "cpu"], "help": "cpu: all of it small, to try it out"},
            "--only": {"nargs": "+", "choices": sorted(PLAN), "help": "these stages alone"},
        },
        "python -m benchmarks.flight",
    )
    args.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.seconds
    with beside([sys.executable, str(_BUILD)], args.out / "build.log"):  # for the last stage
        runs = in_order(
            {name: seconds for name, seconds in PLAN.items() if args.only is None or name in args.only},
            lambda name, seconds: _run(name, args.out, args.device, min(seconds, until - time.monotonic())),
        )
    for run in [
        run for run in runs if is_cudas(run, (each["said"] for each in read(args.out, run) if not each["held"]))
    ]:
        runs.append(_run(run.stage, args.out, args.device, until - time.monotonic(), "blocking"))
        if args.device == "cuda" and shutil.which("compute-sanitizer"):
            runs.append(_run(run.stage, args.out, args.device, until - time.monotonic(), "sanitizer"))
    table = told(runs, args.out)
    (args.out / "table.txt").write_text(table, encoding="utf-8")
    print(table)
    return 0 if all(run.held for run in runs if not run.again) else 1


def _run(stage: str, out: Path, device: str, seconds: float, again: str = "") -> Run:
    """`again`: how a failed stage runs again."""
    if seconds < _LEAST_SECONDS:
        return Run(stage, again, "no time was left", 0.0, late=True)
    command = [sys.executable, "-m", "benchmarks.flight.stages", stage, "--device", device]
    environment = dict(os.environ)
    if again == "blocking":
        environment["CUDA_LAUNCH_BLOCKING"] = "1"
    if again == "sanitizer":
        command = ["compute-sanitizer", "--error-exitcode", "99", *command]
    name = f"{stage}.{again}" if again else stage
    command += ["--out", str(out / f"{name}.jsonl")]
    print(f"{name}: {seconds:.0f} s at most", flush=True)
    run = run_stage(command, environment, out / f"{name}.log", seconds)
    print(f"{name}: {run.ended or 'held'} after {run.seconds:.0f} s", flush=True)
    return replace(run, stage=stage, again=again)


if __name__ == "__main__":
    sys.exit(main())
