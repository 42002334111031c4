"""Seeds of requests."""

from __future__ import annotations

import hashlib
import secrets

SEED_BITS = 63


def choice_seed(seed: int | None, choice: int) -> int:
    """Seed of one of n choices, 63 bits; random without a seed.

    The first choice's is the request's own, so that it does not depend on n.
    """
    if seed is None:
        return secrets.randbits(SEED_BITS)
    if choice == 0:
        return seed & (2**SEED_BITS - 1)
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
