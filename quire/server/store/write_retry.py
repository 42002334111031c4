"""What waits while the disk is full or read-only, so that nothing is lost meanwhile."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from typing import TypeVar

log = logging.getLogger("quire.server")
RETRY_SECONDS = 5.0
"""Seconds between two tries of what the disk refused."""
Result = TypeVar("Result")


def always_false() -> bool:
    return False


async def retry_until_written(
    description: str, operation: Callable[[], Awaitable[Result]], should_give_up: Callable[[], bool] = always_false
) -> Result:
    """What `operation` returns, once the disk takes what it writes. `description` waits for it, for the log. Raises
    what the disk says when it was `should_give_up`."""
    while True:
        try:
            return await operation()
        except (sqlite3.OperationalError, OSError) as error:
            if should_give_up():
                raise
            log.error("%s: data_dir cannot be written: %s", description, error)
            await asyncio.sleep(RETRY_SECONDS)
