"""What is drawn at random, but for tokens: seeds, and names of what is made. Of the system, or of a simulation.

`randbits` is asked as an attribute of this module, so that one assignment replaces the source of everybody.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

randbits: Callable[[int], int] = secrets.randbits
"""A number of so many bits, which nobody can guess."""


def token_hex(size: int) -> str:
    """So many bytes, as twice as many hexadecimal digits."""
    return f"{randbits(8 * size):0{2 * size}x}"


def uuid_hex() -> str:
    """The digits of a UUID of version 4."""
    drawn = token_hex(16)
    return f"{drawn[:12]}4{drawn[13:16]}{'89ab'[int(drawn[16], 16) & 3]}{drawn[17:]}"
