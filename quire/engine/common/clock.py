"""Clocks of the machine or of a simulation, for everything but commands and device code. Call them as attributes of
this module: one assignment then replaces the clock everywhere.
"""

from __future__ import annotations

import time as machine
from collections.abc import Callable

monotonic: Callable[[], float] = machine.monotonic
"""Seconds, equal in a machine's processes."""
time: Callable[[], float] = machine.time
"""Unix time."""
