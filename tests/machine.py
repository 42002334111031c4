"""Replaces the machine's clocks and randomness for the server and the engine's control half."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.engine.common import clock, random_source


def set_clock(
    patch: pytest.MonkeyPatch,
    *,
    monotonic: Callable[[], float] | None = None,
    time: Callable[[], float] | None = None,
) -> None:
    """None keeps the clock."""
    if monotonic is not None:
        patch.setattr(clock, "monotonic", monotonic)
    if time is not None:
        patch.setattr(clock, "time", time)


def set_random(patch: pytest.MonkeyPatch, randbits: Callable[[int], int]) -> None:
    patch.setattr(random_source, "randbits", randbits)
