"""This CPU's bandwidth and arithmetic, measured with Quire's kernels in a process, and cached."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from quire.engine import VERSION
from quire.engine.processes.cpu_cores import usable_cpus
from quire.server.cli.plan.machine import Machine

_TIMEOUT_SECONDS = 120.0
_FRESH_SECONDS = 86_400.0
_CPU = Path("/proc/cpuinfo")


class CpuRates(msgspec.Struct, frozen=True):
    bandwidth: float
    flops: float
    """16-bit operations per second."""
    at: float = 0.0
    """time.time() of the last measurement."""


def read_or_measure_rates(*, must_measure: bool = False) -> CpuRates | None:
    """Returns cached rates that are less than a day old. Otherwise measures, and keeps the better of old and new
    figures, because other programs can only lower them. `must_measure` ignores the cache. If the measurement fails,
    returns the old rates or None.
    """
    rates_by_machine, key = _read_rates_by_machine(), machine_key()
    known = None if must_measure else rates_by_machine.get(key)
    if known is not None and time.time() - known.at < _FRESH_SECONDS:
        return known
    if (measured := _measure_rates()) is None:
        return known
    if known is not None:
        measured = CpuRates(max(measured.bandwidth, known.bandwidth), max(measured.flops, known.flops), measured.at)
    rates_by_machine[key] = measured
    _write_rates_by_machine(rates_by_machine)
    return measured


def with_cpu_rates(machine: Machine, *, must_measure: bool = False) -> Machine:
    cpu_rates = read_or_measure_rates(must_measure=must_measure)
    return (
        machine
        if cpu_rates is None
        else replace(machine, bandwidth=cpu_rates.bandwidth, flops=cpu_rates.flops, measured=True)
    )


def _rates_file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "quire" / "rates.json"


def machine_key() -> str:
    lines = _CPU.read_text(encoding="utf-8").splitlines() if _CPU.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{VERSION}, {name or 'this processor'}, {usable_cpus()} cores, {os.environ.get('QUIRE_CPU_ISA', '')}"


def _measure_rates() -> CpuRates | None:
    print("measuring this machine's memory and arithmetic", file=sys.stderr, flush=True)
    command = [sys.executable, "-P", "-m", "quire.kernels.rates"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_SECONDS, check=True)
        return msgspec.structs.replace(msgspec.json.decode(done.stdout, type=CpuRates), at=time.time())
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return None


def _read_rates_by_machine() -> dict[str, CpuRates]:
    try:
        return msgspec.json.decode(_rates_file().read_bytes(), type=dict[str, CpuRates])
    except (OSError, RuntimeError, msgspec.MsgspecError):  # RuntimeError: no home directory
        return {}


def _write_rates_by_machine(rates_by_machine: dict[str, CpuRates]) -> None:
    try:
        file = _rates_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_bytes(msgspec.json.encode(rates_by_machine))
        new.replace(file)
    except (OSError, RuntimeError):
        return
