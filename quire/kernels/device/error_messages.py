"""Describes errors of GPU libraries in one sentence with a remedy."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import torch

_SOURCE_LOCATION = re.compile(r"at \d+:\d+:$")
"""Matches the first line of a Triton compiler error. The message is in the last line."""
_INSTALL_HINT = "Debian, Ubuntu: apt install gcc libc6-dev python3-dev"


def describe_compiler_error(error: BaseException) -> str | None:
    """Return why Triton cannot compile its C launchers; None for other errors."""
    if "Failed to find C compiler" in str(error):  # triton/runtime/build.py
        return (
            "Triton needs a C compiler to start its kernels and finds none: "
            f"install gcc ({_INSTALL_HINT}), or name one in CC"
        )
    compiler = os.environ.get("CC")
    if isinstance(error, FileNotFoundError) and compiler is not None and error.filename == compiler:
        return f"Triton needs a C compiler, and {compiler!r}, which CC names, is not there"
    if not isinstance(error, subprocess.CalledProcessError):
        return None
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        return (
            f"Triton compiles against Python.h, which is not in {headers}: install Python's headers ({_INSTALL_HINT})"
        )
    command = error.cmd if isinstance(error.cmd, str) else " ".join(map(str, error.cmd))
    return f"the compiler that Triton called failed with status {error.returncode}: {command}"


def is_triton_error(error: BaseException) -> bool:
    """Triton's errors have no common base class."""
    return any(kind.__module__.partition(".")[0] == "triton" for kind in type(error).__mro__)


def describe_kernel_error(error: BaseException) -> str:
    if (compiler := describe_compiler_error(error)) is not None:
        return compiler
    lines = (str(error).strip() or "no message").splitlines()
    text = lines[-1] if _SOURCE_LOCATION.match(lines[0]) else lines[0]
    if "no kernel image" in text or "no kernel found" in text:
        return f"was not built for this GPU ({text}): install a build for it"
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory ({text})"
    if isinstance(error, PermissionError):
        return f"{error.filename} may not be written by uid {os.getuid()}"
    return f"{type(error).__name__}: {text}"
