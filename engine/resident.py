"""How much memory this process has in RAM."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes() -> int:
    """0 where there is no /proc."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
