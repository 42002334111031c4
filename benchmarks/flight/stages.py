"""One stage of a flight: `python -m benchmarks.flight.stages NAME --device cuda --out FILE`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.common.options import options
from benchmarks.flight.finding import Finding, Say
from benchmarks.flight.plan import PLAN

STAGES = {
    "machine": "machine.look",
    "arrivals": "serving.arrivals",
    "everything": "models.everything",
    "models": "models.compare",
    "large": "serving.large",
    "drafts": "models.drafts",
    "compiling": "compiling.ahead",
    "products": "kernels.products",
    "ranks": "ranks.ranks",
    "tests": "marked.tests",
    "flash4": "serving.flash4",
    "http": "serving.http",
    "kernels": "kernels.attention",
    "images": "images.images",
    "cores": "machine.cores",
}
"""A stage imports only its own module: importing all takes seconds."""
assert list(STAGES) == list(PLAN)


def main() -> int:
    device = {"default": "cuda", "choices": ["cuda", "cpu"]}
    args = options(
        __doc__, {"stage": {"choices": sorted(STAGES)}, "--device": device, "--out": {"type": Path, "required": True}}
    )
    wrong, began = 0, time.monotonic()
    with args.out.open("w", encoding="utf-8", buffering=1) as output:

        def say(finding: Finding) -> None:
            nonlocal wrong
            wrong += not finding.held
            output.write(json.dumps(finding._asdict() | {"at": round(time.monotonic() - began, 1)}) + "\n")

        module, name = STAGES[args.stage].split(".")
        run: Callable[[torch.device, Say], None] = getattr(import_module(f"benchmarks.flight.{module}"), name)
        run(torch.device(args.device), say)
    if wrong:
        print(f"{wrong} findings do not hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
