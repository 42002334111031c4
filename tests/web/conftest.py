"""A browser for all tests here, and a server for it to visit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server
from tests.web.browser import CHROMEDRIVER, CHROMIUM, Browser, running_browser


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("no chromium and chromedriver here (Debian: apt install chromium chromium-driver)")
    with running_browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Fails a test whose page had something to complain of; one that expects complaints takes them itself."""
    chromium.errors()
    yield chromium
    complaints = chromium.errors()
    chromium.driver.get("about:blank")
    assert complaints == []


@pytest.fixture(scope="session")
def server(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded model with a small pool, so that a handful of requests fill a good part of the map."""
    log = tmp_path_factory.mktemp("web") / "server.log"
    running = Server(log, "--num-kv-blocks", "600", "--threads", "1")
    yield running
    assert running.stop() == 0, log.read_text()
