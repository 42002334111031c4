from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

OPEN_BATCHES_KEY = "open"


@dataclass(frozen=True, slots=True)
class DataDirStatus:
    leads: bool
    """The leader processes batches and takes over abandoned work."""
    sizes: Mapping[str, int]
    """Stored bytes by kind."""
    counts: Mapping[str, int]
    """Sums over all processes, including ended ones, except for OPEN_BATCHES_KEY."""
    refusal: str
    """Why writes fail now; empty if they succeed."""
