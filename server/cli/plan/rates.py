"""How fast this machine's CPU reads memory and multiplies: measured once, in a process with the kernels, and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from quire.engine import VERSION
from quire.server.cli.plan.machine import Machine

_SECONDS = 120.0
_CPU = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Rates:
    bandwidth: float
    """Bytes per second."""
    flops: float
    """16-bit operations per second."""


def rates(*, again: bool = False) -> Rates | None:
    """Those that are kept, or measured now; `again`: in any case. None where this processor has no kernels."""
    kept, key = _read(), machine_key()
    if again or key not in kept:
        if (made := _measured()) is None:
            return None
        kept[key] = {"bandwidth": made.bandwidth, "flops": made.flops}
        _write(kept)
        return made
    try:
        return Rates(float(kept[key]["bandwidth"]), float(kept[key]["flops"]))
    except (KeyError, TypeError, ValueError):
        return rates(again=True)


def with_rates(machine: Machine, *, again: bool = False) -> Machine:
    """A CPU machine with its rates, where they can be measured."""
    found = rates(again=again)
    return machine if found is None else replace(machine, bandwidth=found.bandwidth, flops=found.flops, measured=True)


def _file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "quire" / "rates.json"


def machine_key() -> str:
    """What another processor, another share of it or other kernels would change."""
    lines = _CPU.read_text(encoding="utf-8").splitlines() if _CPU.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{VERSION}, {name or 'this processor'}, {cores} cores, {os.environ.get('QUIRE_CPU_ISA', '')}"


def _measured() -> Rates | None:
    print("measuring this machine's memory and arithmetic, once", file=sys.stderr, flush=True)
    command = [sys.executable, "-P", "-m", "quire.kernels.rates"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
        found = json.loads(done.stdout)
        return Rates(float(found["bandwidth"]), float(found["flops"]))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None


def _read() -> dict[str, dict[str, float]]:
    try:
        kept = json.loads(_file().read_bytes())
    except (OSError, ValueError, RuntimeError):  # no home directory
        return {}
    return dict(kept) if isinstance(kept, dict) else {}


def _write(kept: dict[str, dict[str, float]]) -> None:
    """Where it can be written: else the next plan measures again."""
    try:
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        new.replace(file)
    except (OSError, RuntimeError):
        return
