"""Clocks of the machine, or of a simulation, for everything but commands and device code.

Call them as attributes of this module, `clock.monotonic()`, so that one assignment replaces the clock everywhere.
Passed as an argument, a clock would go through some fifty constructors.
"""

from __future__ import annotations

import time as machine
from collections.abc import Callable

monotonic: Callable[[], float] = machine.monotonic
"""Seconds since some moment, independent of the date and equal in all processes of a machine."""
time: Callable[[], float] = machine.time
"""Unix time in seconds."""
