from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from typing import TypeVar

log = logging.getLogger("quire.server")
RETRY_SECONDS = 5.0
Result = TypeVar("Result")


def always_false() -> bool:
    return False


async def retry_until_written(
    description: str, operation: Callable[[], Awaitable[Result]], should_give_up: Callable[[], bool] = always_false
) -> Result:
    """Repeats `operation` while the disk refuses writes. Raises the disk's error once `should_give_up` returns True."""
    while True:
        try:
            return await operation()
        except (sqlite3.OperationalError, OSError) as error:
            if should_give_up():
                raise
            log.error("%s: data_dir cannot be written: %s", description, error)
            await asyncio.sleep(RETRY_SECONDS)
