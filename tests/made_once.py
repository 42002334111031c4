"""Folders made once per run and shared by tests and processes."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_folder: Path | None = None


def keep_in(folder: Path) -> None:
    """`folder` is shared by all processes of this run. Without one, each folder is made anew."""
    global _folder
    _folder = folder


def made_once(path: Path, make: Callable[[Path], object], *key: Any) -> Path:
    """Put into `path` what `make(path)` writes there, and leave PyTorch's random state as `make` leaves it.

    `key` holds everything that the result depends on; keys with equal reprs give the same folder. `path` is a copy that
    a test may change.
    """
    if _folder is None:
        make(path)
        return path
    name = hashlib.sha256(repr(key).encode()).hexdigest()
    original = _folder / name
    if not original.exists():
        # Made in a temporary folder and renamed, because another process may be making the same.
        begun = Path(tempfile.mkdtemp(dir=_folder))
        make(begun / "made")
        torch.save(torch.get_rng_state(), begun / "random_state")
        try:
            os.rename(begun, original)
        except OSError:
            shutil.rmtree(begun)
    torch.set_rng_state(torch.load(original / "random_state"))
    shutil.copytree(original / "made", path, dirs_exist_ok=True)
    return path
