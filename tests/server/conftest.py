from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.server.fake import FakeEngine, hashed
from tests.server.house import House, open_house


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """A server on an engine that answers with hash-derived bytes, letters for the most part."""
    async with open_house(FakeEngine(hashed(b"abcdefghijklmnop .\xc3\xa9"))) as opened:
        yield opened
