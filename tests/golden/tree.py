"""A tree to capture: this checkout, or another commit checked out next to it."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tree import ROOT

_KERNELS = Path("kernels", "cpu")


@dataclass(frozen=True)
class Tree:
    name: str
    root: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which this Python imports the tree's `quire`, in processes that it starts, too."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
        return own | {"PYTHONPATH": str(self.root), "PYTHONUNBUFFERED": "1", "COLUMNS": "100", "NO_COLOR": "1"}

    def run(self, arguments: Sequence[str], stdin: str = "", timeout: float = 1800) -> subprocess.CompletedProcess[str]:
        """Run this Python with the tree's `quire`, somewhere that has no `quire` of its own."""
        return subprocess.run(
            [sys.executable, "-P", *arguments],
            input=stdin,
            env=self.environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


def check_out(commit: str, folder: Path) -> Tree:
    """Check out a commit into `folder`, with its CPU kernels: this tree's if their sources are equal, else built."""
    folder.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    kernels = _kernels_of(folder)
    if _same_sources(_kernels_of(ROOT), kernels):
        for library in _kernels_of(ROOT).rglob("*.so"):
            shutil.copy2(library, kernels / library.relative_to(_kernels_of(ROOT)))
    else:
        subprocess.run([sys.executable, str(kernels / "build.py")], cwd=folder, check=True)
    return Tree("base", folder)


def _kernels_of(root: Path) -> Path:
    """Where the tree keeps them: below `quire`, of which the folder at the top may be a link."""
    inside = root / "quire" / _KERNELS
    return inside if inside.exists() else root / _KERNELS


def _same_sources(one: Path, other: Path) -> bool:
    def sources(folder: Path) -> dict[Path, Path]:
        files = (path for kind in ("*.cpp", "*.h", "build.py") for path in folder.rglob(kind))
        return {path.relative_to(folder): path for path in files}

    ours, theirs = sources(one), sources(other)
    same_names = ours.keys() == theirs.keys()
    return same_names and all(filecmp.cmp(ours[name], theirs[name], shallow=False) for name in ours)
