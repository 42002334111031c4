"""How fast this machine's CPU reads memory and multiplies: measured in a process with the kernels, and kept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from quire.engine import VERSION
from quire.engine.replicas.cores import usable_cpus
from quire.server.cli.plan.machine import Machine

_SECONDS = 120.0
_FRESH_SECONDS = 86_400.0
_CPU = Path("/proc/cpuinfo")


class Rates(msgspec.Struct, frozen=True):
    bandwidth: float
    """Bytes per second."""
    flops: float
    """16-bit operations per second."""
    at: float = 0.0
    """Time of time.time() of the last measurement."""


def rates(*, again: bool = False) -> Rates | None:
    """Those that are kept. Measured where none are, and after a day: the better figure of both stays then, for other
    programs that run beside a measurement only lower it. `again`: measured in any case, and what was kept does not
    count. None where this processor has no kernels."""
    kept, key = _read(), machine_key()
    known = None if again else kept.get(key)
    if known is not None and time.time() - known.at < _FRESH_SECONDS:
        return known
    if (made := _measured()) is None:
        return known
    if known is not None:
        made = Rates(max(made.bandwidth, known.bandwidth), max(made.flops, known.flops), made.at)
    kept[key] = made
    _write(kept)
    return made


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
    return f"{VERSION}, {name or 'this processor'}, {usable_cpus()} cores, {os.environ.get('QUIRE_CPU_ISA', '')}"


def _measured() -> Rates | None:
    print("measuring this machine's memory and arithmetic", file=sys.stderr, flush=True)
    command = [sys.executable, "-P", "-m", "quire.kernels.rates"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
        return msgspec.structs.replace(msgspec.json.decode(done.stdout, type=Rates), at=time.time())
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return None


def _read() -> dict[str, Rates]:
    try:
        return msgspec.json.decode(_file().read_bytes(), type=dict[str, Rates])
    except (OSError, RuntimeError, msgspec.MsgspecError):  # RuntimeError: no home directory
        return {}


def _write(kept: dict[str, Rates]) -> None:
    """Where it can be written: else the next plan measures again."""
    try:
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_bytes(msgspec.json.encode(kept))
        new.replace(file)
    except (OSError, RuntimeError):
        return
