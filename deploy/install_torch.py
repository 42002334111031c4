"""Installs PyTorch beside this Python: on a machine without an NVIDIA GPU its build for CPUs, a tenth as large.

    python deploy/install_torch.py [cpu|cuda]      # whose build; without it, what this machine has a driver for

That build is in PyTorch's own index. The variable TORCH_INDEX names another one, in which any build may be; where it is
empty, and where the index cannot be reached, the usual index has the build with CUDA. What pip's own variables and
files say holds as well. Needs nothing but the standard library.
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
"""That an index may take to answer."""


def main(arguments: Sequence[str]) -> int:
    if is_installed():
        return 0
    index = wanted_index(os.environ, sys.platform, arguments[0] if arguments else driver(Path("/")))
    if index is not None and (why := unreachable(index)):
        print(f"{index} cannot be reached ({why}): PyTorch comes from the usual index, with CUDA")
        index = None
    more = [] if index is None else ["--extra-index-url", index]
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "-c",
        str(CONSTRAINTS),
        *more,
        "torch",
    ]
    return subprocess.run(command).returncode


def is_installed() -> bool:
    """Whether the version of the constraints is there already, of whichever build: pip would leave that alone."""
    pinned = re.search(r"^torch==(.+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    try:
        return pinned is not None and metadata.version("torch").partition("+")[0] == pinned[1]
    except metadata.PackageNotFoundError:
        return False


def wanted_index(variables: Mapping[str, str], platform: str, kind: str) -> str | None:
    """An index to look in beside the usual one. `kind`: cpu or cuda, whose build is wanted."""
    if "TORCH_INDEX" in variables:
        return variables["TORCH_INDEX"] or None
    return CPU_BUILDS if platform == "linux" and kind == "cpu" else None  # elsewhere all builds are for CPUs


def driver(root: Path) -> str:
    """cuda where there is an NVIDIA driver, else cpu."""
    found = (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidia0").exists()
    return "cuda" if found or shutil.which("nvidia-smi") is not None else "cpu"


def unreachable(index: str) -> str:
    """Why an index cannot be asked for PyTorch; "" where it can. Certificates are those of pip's variables."""
    try:
        trust = next((os.environ[name] for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE") if os.environ.get(name)), None)
        request = urllib.request.Request(f"{index.rstrip('/')}/torch/", headers={"User-Agent": "pip"})
        context = ssl.create_default_context(cafile=trust)
        with urllib.request.urlopen(request, timeout=SECONDS, context=context):
            return ""
    except (OSError, ValueError) as error:  # a URLError, or an address that is none
        return str(getattr(error, "reason", error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
