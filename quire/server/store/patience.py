"""What waits while the disk is full or read-only, so that nothing is lost meanwhile."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from typing import TypeVar

log = logging.getLogger("quire.server")
PATIENCE = 5.0
"""Seconds between two tries of what the disk refused."""
Done = TypeVar("Done")


def never() -> bool:
    return False


async def patiently(what: str, do: Callable[[], Awaitable[Done]], given_up: Callable[[], bool] = never) -> Done:
    """What `do` returns, once the disk takes what it writes. `what` waits for it, for the log. Raises what the disk
    says when it was `given_up`."""
    while True:
        try:
            return await do()
        except (sqlite3.OperationalError, OSError) as error:
            if given_up():
                raise
            log.error("%s: data_dir cannot be written: %s", what, error)
            await asyncio.sleep(PATIENCE)
