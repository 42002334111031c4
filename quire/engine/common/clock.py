"""Clocks of the machine or of a simulation. Call them as attributes of this module, so that one assignment replaces the
clock everywhere except in commands and device code.
"""

from __future__ import annotations

import time as machine
from collections.abc import Callable

monotonic: Callable[[], float] = machine.monotonic
"""Seconds, the same in all processes of a machine."""
time: Callable[[], float] = machine.time
"""Unix time."""
