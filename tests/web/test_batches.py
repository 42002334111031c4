"""Files and batches on the page, and a conversation that continues after a reload during an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from tests.e2e.server import Server
from tests.web.browser import Browser
from tests.web.test_access import overflowing, violations
from tests.web.test_playground import LAST, STORY, answer, flat, said, settled, visited

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def keeping(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keeping")
    running = Server(
        folder / "server.log", "--num-kv-blocks", "600", "--threads", "1", "--data-dir", str(folder / "data")
    )
    yield running
    assert running.stop() == 0, running.log.read_text()


def test_uploaded_batch_file_completes_and_invalid_file_shows_error(
    browser: Browser, keeping: Server, tmp_path: Path
) -> None:
    body = {"model": "quire-demo", "prompt": "Once", "max_tokens": 5}
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": "/v1/completions", "body": body} for n in range(6)]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "wrong.jsonl").write_text("no JSON\n")
    browser.open(f"{keeping.url}/#/batches")
    browser.one("#batch-file").send_keys(str(tmp_path / "asked.jsonl"))
    browser.click("#batch-form button")
    browser.until(lambda: "completed, 6 of 6" in browser.text("#batch-list"))
    assert browser.one("#batch-list progress").get_property("value") == 6
    assert browser.text("#batch-list .buttons") == "Results"
    assert browser.text("#file-list").count("jsonl") == 2, "what was asked, and the results"
    for width in (1440, 390):
        browser.resize(width, 900)
        assert violations(browser) == []
        assert overflowing(browser, width) == []
    browser.resize(1440, 1000)
    browser.one("#batch-file").send_keys(str(tmp_path / "wrong.jsonl"))
    browser.click("#batch-form button")
    browser.until(lambda: "not JSON" in browser.text("#batch-problem"))
    browser.click("#file-list li:last-child button:last-child")
    browser.until(lambda: browser.text("#file-list").count("jsonl") == 1)


def test_empty_batch_page_offers_example_batch(browser: Browser, tmp_path: Path) -> None:
    running = Server(tmp_path / "server.log", "--num-kv-blocks", "600", "--data-dir", str(tmp_path / "data"))
    browser.open(f"{running.url}/#/batches")
    browser.click("#batch-try")
    browser.until(lambda: "completed, 2 of 2" in browser.text("#batch-list"))
    assert not browser.one("#batch-list").get_property("hidden")
    assert browser.run("return document.getElementById('batch-none').hidden")
    browser.driver.get("about:blank")
    assert running.stop() == 0


def test_batch_page_names_data_dir_flag_when_unset(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/#/batches")
    browser.until(lambda: "--data-dir" in browser.text("#batch-problem"))
    assert not any(each.is_displayed() for each in browser.all(".batch-part"))
    browser.errors()  # the browser logs the status 404


def test_playground_answer_resumes_after_reload(browser: Browser, keeping: Server) -> None:
    page = visited(browser, keeping)
    page.fill("#draft", STORY + Keys.ENTER)
    page.until(lambda: page.all(LAST) and len(said(page)) > 20)
    page.driver.refresh()
    whole = answer(keeping, [{"role": "user", "content": STORY}])
    assert flat(settled(page)) == flat(whole)
    assert len(page.all("#log .message")) == 2
    page.driver.refresh()
    page.until(lambda: page.all(LAST) and flat(said(page)) == flat(whole))
    assert len(page.all("#log .message")) == 2, "nothing is asked for again"
