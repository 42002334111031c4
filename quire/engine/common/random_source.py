"""Random seeds and names, from the operating system or a simulation. Call `randbits` as an attribute of this module.
Then one assignment replaces it everywhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

randbits: Callable[[int], int] = secrets.randbits


def token_hex(size: int) -> str:
    """`size` is in bytes."""
    return f"{randbits(8 * size):0{2 * size}x}"


def uuid_hex() -> str:
    drawn = token_hex(16)
    return f"{drawn[:12]}4{drawn[13:16]}{'89ab'[int(drawn[16], 16) & 3]}{drawn[17:]}"
