from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.flight.finding import Finding, Say, tried
from benchmarks.gpu import decode, limits, model_directory, prefill, start
from quire.kernels.backend_selection import BACKENDS, select_backend
from quire.kernels.cpu import native_library

_PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-4", "flash-attn-3", "transformers", "safetensors", "msgspec")
_DIM = 128
"""Llama's head size."""


def look(device: torch.device, say: Say) -> None:
    say(Finding("processor", f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}"))
    say(Finding("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)))
    if device.type == "cuda":
        tried(say, "card", lambda: _card(device))
        for tool in ("nvcc", "compute-sanitizer", "gcc"):
            say(Finding(tool, shutil.which(tool) or "not there"))
    tried(say, "limits", lambda: _limits(device))
    for name in BACKENDS if device.type == "cuda" else ("cpu", "reference"):
        _try(name, device, say)


def cores(device: torch.device, say: Say) -> None:
    """Decode of one row, prefill of 512 tokens."""
    most = os.cpu_count() or 1
    if isinstance(missing := native_library.load_library_or_reason(), str):
        say(Finding("CPU kernels", missing, held=device.type == "cpu"))
    args = argparse.Namespace(device="cpu", attention_backend="auto", deterministic=False, enforce_eager=True)
    with model_directory("tiny" if device.type == "cpu" else "qwen3-0.6b") as path:
        for threads in (16, 4, 1, 8, 2):
            if threads <= most:
                tried(say, f"CPU kernels, {threads} threads", partial(_threads, threads, path, args))


def _threads(count: int, path: Path, args: argparse.Namespace) -> str:
    engine = start(path, args, threads=count)
    seconds, _ = decode(engine, 1, 16)
    prompt = prefill(engine, 512, 1)
    engine.shut_down()
    return f"decode {seconds * 1e3:.2f} ms, a prompt of 512 tokens {prompt * 1e3:.0f} ms; {engine.info.backend}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _card(device: torch.device) -> str:
    card = torch.cuda.get_device_properties(device)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return (
        f"{card.name}, {card.major}.{card.minor}, {card.total_memory / 2**30:.0f} GiB, {card.multi_processor_count} "
        f"processors, driver {driver or 'unknown'}, CUDA {torch.version.cuda}"
    )


def _limits(device: torch.device) -> str:
    copy, matmul = limits(device)
    return f"copies {copy / 1e12:.2f} TB/s, multiplies {matmul / 1e12:.0f} TFLOP/s in bfloat16"


def _try(name: str, device: torch.device, say: Say) -> None:
    """Availability only; the kernel stage checks results."""
    try:
        _, said = select_backend(device, torch.bfloat16, _DIM, name)
    except ValueError as error:
        said = str(error).removeprefix(f"{name}: ")
    say(Finding(f"attention by {name}", said))
