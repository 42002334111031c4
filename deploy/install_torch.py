"""Installs PyTorch for this Python: the CPU build, a tenth of the size, on a machine without an NVIDIA GPU.

    python deploy/install_torch.py [cpu|cuda]      # default: by this machine's driver

The CPU build is in PyTorch's own index. TORCH_INDEX names another index, with any build; if it is empty, or the index
is unreachable, pip's usual index decides the build. pip's variables and files apply. Needs only the standard
library.
"""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
SECONDS = 10
"""How long an index may take to answer."""


def main(arguments: Sequence[str]) -> int:
    if is_installed():
        return 0
    index = wanted_index(os.environ, sys.platform, arguments[0] if arguments else driver(Path("/")))
    if index is not None and (why := unreachable(index)):
        print(
            f"{index} cannot be reached ({why}): PyTorch comes from pip's usual index, which may have only CUDA builds",
            flush=True,
        )
        index = None
    more = [] if index is None else ["--extra-index-url", index]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-compile",
        "-c",
        str(CONSTRAINTS),
        *more,
        "torch",
    ]
    return subprocess.run(command).returncode


def is_installed() -> bool:
    """True if the pinned version is installed, in any build: pip would keep it."""
    pinned = re.search(r"^torch==(.+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    try:
        return pinned is not None and metadata.version("torch").partition("+")[0] == pinned[1]
    except metadata.PackageNotFoundError:
        return False


def wanted_index(variables: Mapping[str, str], platform: str, kind: str) -> str | None:
    """An additional index. `kind`: cpu or cuda."""
    if "TORCH_INDEX" in variables:
        return variables["TORCH_INDEX"] or None
    return CPU_BUILDS if platform == "linux" and kind == "cpu" else None  # other platforms have only CPU builds


def driver(root: Path) -> str:
    """cuda or cpu."""
    found = (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidia0").exists()
    return "cuda" if found or shutil.which("nvidia-smi") is not None else "cpu"


def unreachable(index: str) -> str:
    """Why the index is unreachable, or "". Uses the certificates of pip's variables."""
    try:
        trust = next((os.environ[name] for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE") if os.environ.get(name)), None)
        request = urllib.request.Request(f"{index.rstrip('/')}/torch/", headers={"User-Agent": "pip"})
        context = ssl.create_default_context(cafile=trust)
        with urllib.request.urlopen(request, timeout=SECONDS, context=context):
            return ""
    except (OSError, ValueError) as error:  # a URLError or an invalid address
        return str(getattr(error, "reason", error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
