"""The project's files: those that git tracks, or would track if added."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@cache
def source_files() -> tuple[Path, ...]:
    """Paths relative to the root. Without git (an unpacked archive): everything that is not hidden or generated."""
    try:
        command = ["git", "ls-files", "-coz", "--exclude-standard"]
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        paths = [Path(name) for name in listing.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path.relative_to(ROOT) for path in ROOT.rglob("*") if not _generated(path.relative_to(ROOT))]
    return tuple(sorted(path for path in paths if (ROOT / path).is_file() or (ROOT / path).is_symlink()))


def _generated(path: Path) -> bool:
    skipped = {"__pycache__", "build", "dist"}
    return any(part in skipped or part.startswith(".") or part.endswith(".egg-info") for part in path.parts)
