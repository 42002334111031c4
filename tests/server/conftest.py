from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.server.api import Api, open_api
from tests.server.fake import FakeEngine, hashed


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    """A server on an engine that answers with hash-derived bytes, letters for the most part."""
    async with open_api(FakeEngine(hashed(b"abcdefghijklmnop .\xc3\xa9"))) as opened:
        yield opened
