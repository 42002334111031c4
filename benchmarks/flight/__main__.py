"""`python -m benchmarks.flight [--call 2] [--out FOLDER] [--device cuda] [--only STAGE ...]`; imports no torch."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.common.options import options
from benchmarks.flight.plan import CALLS, PLAN
from benchmarks.flight.process import Run, beside, in_order, is_cudas, run_stage
from benchmarks.flight.table import read, told

_BUILD = Path(__file__).parents[2] / "quire" / "kernels" / "cpu" / "build.py"
_LEAST_SECONDS = 5.0
"""Seconds that a stage must have left to start."""


def main() -> int:
    args = options(
        __doc__,
        {
            "--out": {"default": Path("flight"), "help": "folder of the results"},
            "--call": {"default": 1, "choices": [1, 2], "help": "2: the stages that the first call leaves out"},
            "--seconds": {"type": float, "help": "of all stages and second runs together; default: of the plan"},
            "--device": {"default": "cuda", "choices": ["cuda", "cpu"], "help": "cpu: all of it small, to try it out"},
            "--only": {"nargs": "+", "choices": sorted(PLAN), "help": "these stages alone"},
        },
        "python -m benchmarks.flight",
    )
    args.out.mkdir(parents=True, exist_ok=True)
    plan = CALLS[args.call - 1] if args.only is None else {name: PLAN[name] for name in PLAN if name in args.only}
    until = time.monotonic() + (sum(plan.values()) if args.seconds is None else args.seconds)
    runs: list[Run] = []

    def run_and_tell(name: str, seconds: float, again: str = "") -> Run:
        runs.append(run_named_stage(name, args.out, args.device, min(seconds, until - time.monotonic()), again))
        (args.out / "table.txt").write_text(told(runs, args.out), encoding="utf-8")
        return runs[-1]

    with beside([sys.executable, str(_BUILD)], args.out / "build.log"):  # for stages on the CPU
        in_order(plan, run_and_tell)
    for run in [
        run for run in runs if is_cudas(run, (each["said"] for each in read(args.out, run) if not each["held"]))
    ]:
        run_and_tell(run.stage, float("inf"), "blocking")
        if args.device == "cuda" and shutil.which("compute-sanitizer"):
            run_and_tell(run.stage, float("inf"), "sanitizer")
    print((args.out / "table.txt").read_text(encoding="utf-8"))
    return 0 if all(run.held for run in runs if not run.again) else 1


def run_named_stage(stage: str, out: Path, device: str, seconds: float, again: str = "") -> Run:
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
