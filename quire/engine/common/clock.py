"""What tells the time, but to commands and to device code: the machine's clocks, or those of a simulation.

Both are asked as attributes of this module, as in `clock.monotonic()`, so that one assignment moves the clock of
everybody. A clock as an argument would go through some fifty constructors.
"""

from __future__ import annotations

import time as machine
from collections.abc import Callable

monotonic: Callable[[], float] = machine.monotonic
"""Seconds since some moment, whatever the date is set to. All processes of a machine have the same."""
time: Callable[[], float] = machine.time
"""Seconds of the Unix clock."""
