"""Clocks of the machine or of a simulation. Call them as attributes of this module, so that one assignment replaces a
clock everywhere except in commands and device code.
"""

from __future__ import annotations

import time as machine
from collections.abc import Callable

monotonic: Callable[[], float] = machine.monotonic
"""Seconds since an arbitrary time that is the same for all processes of a machine."""
time: Callable[[], float] = machine.time
"""Seconds since the Unix epoch."""
