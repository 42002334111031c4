"""Clocks of the machine or of a simulation. Callers write `clock.monotonic()` and do not import the function, so that a
simulation can replace the clock by assigning to this module. Code of commands and of devices measures time with
Python's own `time` instead.
"""

from __future__ import annotations

import time as machine
from collections.abc import Callable

monotonic: Callable[[], float] = machine.monotonic
"""Seconds since an arbitrary time that is the same for all processes of a machine."""
time: Callable[[], float] = machine.time
"""Seconds since the Unix epoch."""
