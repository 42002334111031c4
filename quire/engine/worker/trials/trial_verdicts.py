"""Files with the verdicts of trials, next to Triton's kernels."""

from __future__ import annotations

import hashlib
import logging
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

from quire.engine import VERSION
from quire.engine.worker.trials.trial_request import TrialRequest, TrialVerdict
from quire.kernels import backend_selection

log = logging.getLogger("quire.engine")

_PACKAGES = (
    "torch",
    "triton",
    "flash-attn",
    "flash_attn_3",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "quack-kernels",
    "apache-tvm-ffi",
    "cuda-bindings",
)
"""Attention libraries, and the packages that compile their kernels on the machine."""


class VerdictKey(msgspec.Struct, frozen=True):
    machine: dict[str, str]
    request: TrialRequest


class _VerdictFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: VerdictKey
    verdict: TrialVerdict


def describe_machine(device: torch.device, driver: str | None) -> dict[str, str]:
    machine = {
        "card": torch.cuda.get_device_name(device),
        "compute capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "driver": driver or "none",
        "CUDA": torch.version.cuda or "none",
        "Quire": VERSION,
        "Quire's kernels": _kernel_sources_digest(),
    }
    for name in _PACKAGES:
        try:
            machine[name] = version(name)
        except PackageNotFoundError:
            continue
    return machine


def _kernel_sources_digest() -> str:
    digest = hashlib.sha256()
    folder = Path(backend_selection.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def verdict_path(folder: Path, key: VerdictKey) -> Path:
    digest = hashlib.sha256(msgspec.json.encode(key, order="deterministic")).hexdigest()
    return folder / f"{key.request.backend}-{digest[:16]}.json"


def read_verdict(path: Path, key: VerdictKey) -> TrialVerdict | None:
    """A file with other content is ignored until the next verdict replaces it."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_VerdictFile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s is not the verdict of a trial (%s): it is ignored, and the trial runs again", path, error)
        return None
    if content.key != key:
        log.warning("%s is the verdict of another trial: it is ignored, and the trial runs again", path)
        return None
    return content.verdict


def write_verdict(path: Path, key: VerdictKey, verdict: TrialVerdict) -> bool:
    part = path.with_suffix(f".{os.getpid()}")  # another starting process must not read half a file
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part.write_bytes(msgspec.json.encode(_VerdictFile(key, verdict)))
        os.replace(part, path)
    except OSError as error:
        log.warning("the verdict of a trial cannot be saved: %s", error)
        return False
    return True
