"""`quire collect-env`: this machine and relevant versions, for a bug report. Sends nothing; shows no keys, tokens or
paths.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quire.engine import VERSION
from quire.engine.settings.settings_reader import ENV_PREFIX
from quire.server.cli.flags import build_parser
from quire.server.cli.plan.machine import detect_machine
from quire.server.cli.unknown_flags import parse_flags

_PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "flash-attn",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "llguidance",
    "numpy",
    "pydantic",
    "fastapi",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "msgspec",
    "pyzmq",
)
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "HF_HUB_OFFLINE",
    "PYTORCH_ALLOC_CONF",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
)
_SECRET_NAME_PARTS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "MODEL", "DIR", "FILE", "PATH", "URL", "ENDPOINT")
_TIMEOUT_SECONDS = 10.0


def main(argv: Sequence[str], started: float) -> int:
    parse_flags(build_parser("quire collect-env", __doc__, {}), argv)
    for name, value in environment_facts():
        print(f"{name:<18}{value}")
    return 0


def environment_facts() -> Iterator[tuple[str, str]]:
    yield "quire", VERSION
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}, {' '.join(platform.libc_ver())}"
    machine = detect_machine()
    yield "computes on", f"{machine.name}, {machine.memory / 2**30:.1f} GiB free for a model"
    yield "cpu", f"{_cpu_name()}; {os.cpu_count()} threads, {len(os.sched_getaffinity(0))} of them for this process"
    yield "container", "yes" if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists() else "not seen"
    yield from _gpu_facts()
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
    for name, value in sorted(os.environ.items()):
        if name in _VARIABLES or name.startswith(ENV_PREFIX):
            yield name, "set" if any(part in name for part in _SECRET_NAME_PARTS) else value


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), sys.platform)


def _gpu_facts() -> Iterator[tuple[str, str]]:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        yield "gpu", "nvidia-smi reports none"
        return
    for number, line in enumerate(listing.splitlines()):
        yield f"gpu {number}", line
