"""The live view of the engine in a real browser, compared with the metrics and the streams."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.e2e.server import Server
from tests.web.browser import Browser

pytestmark = pytest.mark.slow

TOTAL = 600
"""KV blocks of the server's pool."""


@contextmanager
def streams(server: Server, count: int, **fields: Any) -> Iterator[list[list[Any]]]:
    """Run `count` streams until the block ends; yield the events of each as they arrive."""
    ended = threading.Event()
    events: list[list[Any]] = [[] for _ in range(count)]
    body = {"max_tokens": 8000, "ignore_eos": True, "stream": True, **fields}

    def read(index: int) -> None:
        prompt = f"Tale {index}: once upon a time there was a king who had {index} sons, and the eldest of them said"
        request_body = {"prompt": prompt, **body}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=request_body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if ended.is_set():
                    return
                if line.startswith("data: {"):
                    events[index].append(json.loads(line[6:]))

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(read, index) for index in range(count)]
        try:
            yield events
        finally:
            ended.set()
            for future in futures:
                future.result()


@pytest.fixture
def page(browser: Browser, patient: Server) -> Browser:
    browser.open(f"{patient.url}/#/engine")
    browser.until(lambda: browser.text("#live") == "Live" and browser.all("#facts dd"))
    return browser


def legend(page: Browser) -> list[int]:
    """Numbers of blocks that are empty, cached, shared, and held by one request."""
    return [int(count.replace(",", "")) for count in each(page, "#legend b", "textContent")]


def each(page: Browser, selector: str, name: str) -> list[str]:
    """A property of all matching elements, read in one call, because rows may be redrawn meanwhile."""
    script = "return [...document.querySelectorAll(arguments[0])].map((each) => each[arguments[1]])"
    return [str(value) for value in page.run(script, selector, name)]


def colours(page: Browser) -> list[list[int]]:
    """Colors at the middle of the lower edge of the canvas's first and last squares."""
    return page.run(
        "const canvas = document.getElementById('pages'), context = canvas.getContext('2d');"
        "const last = canvas.height - 6;"
        "return [[2, 2], [2, last]].map(([x, y]) => [...context.getImageData(x, y, 1, 1).data])"
    )


def test_dashboard_lists_running_requests_and_maps_their_blocks(page: Browser, patient: Server) -> None:
    with streams(patient, 3) as events:
        page.until(lambda: len(page.all("#requests tbody tr")) == 3 and legend(page)[3] > 20)
        ids = set(each(page, "#requests tbody .name", "title"))
        page.until(lambda: all(events))
        assert ids == {f"{stream[0]['id']}-0" for stream in events}
        assert set(each(page, "#requests .phase", "textContent")) <= {"prefill", "decode"}
        assert sum(legend(page)) == TOTAL
        used, empty = colours(page)
        assert used != empty
        assert used[3] == empty[3] == 255
        page.one("#pages").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_UP)
        page.until(lambda: page.text("#page-readout").startswith("Block 0: "))
        # The readout also names the owner of block 0.
        readout = page.text("#page-readout")
        assert any(f"held by {owner}" in readout for owner in ids) or "cached" in readout
        page.until(lambda: page.text(".figure.running dd") == "3")
        held = patient.metric("vllm:kv_cache_usage_perc") * TOTAL
        assert abs(sum(legend(page)[2:]) - held) < 0.2 * TOTAL
        page.until(lambda: any(text not in ("–", "0") for text in page.text(".chart .readings b").split()))
    page.until(lambda: not page.all("#requests tbody tr"))
    page.until(lambda: legend(page)[2:] == [0, 0])
    assert legend(page)[1] > 0, "what was computed stays cached"


def test_cancel_button_aborts_one_request_only(page: Browser, patient: Server) -> None:
    with streams(patient, 2) as events:
        page.until(lambda: len(page.all("#requests tbody tr")) == 2 and all(events))
        row = each(page, "#requests tbody .name", "title").index(f"{events[0][0]['id']}-0") + 1
        page.one(f"#requests tbody tr:nth-child({row}) .danger").send_keys(Keys.ENTER)
        page.until(lambda: events[0][-1]["choices"][0]["finish_reason"] == "abort")
        page.until(lambda: len(page.all("#requests tbody tr")) == 1)
        focused = page.run("return document.activeElement.getAttribute('aria-label') ?? ''")
        assert focused.startswith("Cancel request"), "the keyboard goes on at the next row"
        before = len(events[1])
        page.until(lambda: len(events[1]) > before)
        assert events[1][-1]["choices"][0]["finish_reason"] is None


def test_explain_dialog_shows_phases_of_running_request(page: Browser, patient: Server) -> None:
    with streams(patient, 1) as events:
        page.until(lambda: all(events) and page.all("#requests tbody .name"))
        page.click("#requests tbody .name")
        page.until(lambda: page.one("#explain-dialog").is_displayed())
        assert page.text("#explain-sum").endswith(" in all, so far")
        script = "return [...document.querySelectorAll('#explain-dialog .strip span')].map((each) => each.title)"
        assert [each.partition(":")[0] for each in page.run(script)][:2] == [
            "Prepare (before the engine)",
            "Queue (waiting for a place)",
        ]
        assert "It took part in" in page.text("#explain-body")
        page.click("#explain-json")
        page.until(lambda: page.one("#text-dialog").is_displayed())
        assert events[0][0]["id"] in str(page.one("#text-body").get_property("value"))
        page.click("#text-dialog [data-close]")


@pytest.mark.parametrize("by", ["click", "keyboard"])
def test_explain_dialog_opens_at_its_top_when_block_is_chosen(page: Browser, patient: Server, by: str) -> None:
    page.resize(1440, 420)  # too low for the whole dialog
    with streams(patient, 1) as events:
        page.until(lambda: all(events) and page.all("#requests tbody .name"))
        answer_id = events[0][0]["id"]
        block = patient.get(f"/v1/engine/requests/{answer_id}-0/blocks").json()["block_ids"][-1]
        pages = page.one("#pages")
        if by == "click":
            square = 20  # CSS pixels, in a window of this width
            row, column = divmod(block, pages.size["width"] // square)
            x, y = (column + 0.4) * square - pages.size["width"] / 2, (row + 0.4) * square - pages.size["height"] / 2
            ActionChains(page.driver).move_to_element_with_offset(pages, round(x), round(y)).click().perform()
        else:
            pages.send_keys(Keys.ARROW_RIGHT * (block + 1), Keys.ENTER)
        page.until(lambda: page.one("#explain-dialog").is_displayed())
        assert page.run("return document.getElementById('explain-dialog').scrollTop") == 0
        assert page.one("#explain-dialog [data-close]").is_displayed()
        page.click("#explain-json")
        page.until(lambda: answer_id in str(page.one("#text-body").get_property("value")))
        page.click("#text-dialog [data-close]")


def latest(page: Browser) -> str:
    """Id and path of the answer that ended last; "" while none is listed."""
    return "".join(each(page, "#answers tr:first-child .name", "title"))


def test_finished_request_stays_listed_with_explanation(page: Browser, patient: Server) -> None:
    body = {"prompt": "once upon a time", "max_tokens": 3, "ignore_eos": True}
    completion = httpx.post(f"{patient.url}/v1/completions", json=body, timeout=120).json()
    with streams(patient, 1) as events:
        page.until(lambda: all(events) and completion["id"] in latest(page))
        (request, *_) = patient.get("/v1/engine/requests?limit=1").json()["data"]
        cells = [text.split(" (")[0] for text in each(page, "#answers tbody tr:first-child td", "textContent")]
        assert (cells[2], cells[3], cells[-2]) == (request["model"], "length", str(request["prompt_tokens"]))
        assert cells[-1] == "3"
        assert not page.one("#answers").text.count(events[0][0]["id"][:12]), "it has not ended"
        page.click("#answers tbody tr:first-child .name")
        page.until(lambda: page.one("#explain-dialog").is_displayed())
        assert "The first of 3 tokens" in page.text("#explain-body")
        page.click("#explain-dialog [data-close]")
    running = events[0][0]["id"]
    page.until(lambda: running in latest(page))
    assert each(page, "#answers tbody tr:first-child .phase", "textContent") == ["abort"]
    assert not page.one("#dashboard").find_element("id", "tenants-sheet").is_displayed(), "nobody needs a key here"


def test_legend_counts_shared_blocks_of_identical_prompts(page: Browser, patient: Server) -> None:
    with streams(patient, 2, prompt=[7] * 64) as events:
        page.until(lambda: all(events) and legend(page)[2] >= 3)
        page.until(lambda: "shared" in page.text("#requests tbody"))


def test_dashboard_counts_engine_death_and_keeps_streams(page: Browser, patient: Server) -> None:
    deaths = int(page.text(".figure.deaths dd"))
    with streams(patient, 1) as events:
        page.until(lambda: all(events))
        pid = patient.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        page.until(lambda: page.text(".figure.deaths dd") == str(deaths + 1))
        before = len(events[0])
        page.until(lambda: page.text("#live") == "Live" and len(page.all("#requests tbody tr")) == 1)
        page.until(lambda: len(events[0]) > before)
        assert int(page.text(".figure.replays dd")) >= 1


def test_dashboard_opens_event_stream_once_per_view(page: Browser, patient: Server) -> None:
    page.click("#to-playground")
    page.one("#draft")
    count = "(...all) => { asked += `${all[0]}`.includes('/engine/events'); return real(...all) }"
    page.run(f"window.asked = 0; const real = fetch; window.fetch = {count}")
    page.click("#to-dashboard")
    page.until(lambda: page.run("return asked") == 1)
    page.until(lambda: page.text("#live") == "Live")


def test_api_key_dialog_stores_key_only_on_request(browser: Browser, tmp_path: Path) -> None:
    keys = ("--api-key", "open-sesame", "--admin-api-key", "boss")
    guarded = Server(tmp_path / "log", *keys, "--num-kv-blocks", "200", "--threads", "1")
    try:
        browser.open(f"{guarded.url}/")
        assert browser.one("#key-dialog").is_displayed()
        assert browser.text("#key-why").startswith("This server asks for a key. Whoever runs")
        browser.fill("#key", "wrong" + Keys.ENTER)
        browser.until(lambda: browser.text("#key-why").startswith("Incorrect API key provided. Whoever runs"))
        browser.fill("#key", "open-sesame" + Keys.ENTER)
        browser.until(lambda: browser.text("#model") == "quire-demo")
        browser.fill("#draft", "Tell me a story." + Keys.ENTER)
        browser.until(lambda: "tokens" in browser.text("#log .message:last-child .note"))
        browser.click("#to-dashboard")
        browser.until(lambda: "needs an admin's API key" in browser.text("#key-why"))
        assert "may watch the engine" in browser.text("#live")
        browser.fill("#key", "boss" + Keys.ENTER)
        browser.until(lambda: browser.text("#live") == "Live")
        browser.until(lambda: [row.split()[0] for row in each(browser, "#tenants tbody tr", "innerText")] == ["key-1"])
        assert browser.run("return JSON.stringify({...localStorage})").count("boss") == 0
        browser.click("#key-button")
        browser.click("#key-keep")
        browser.one("#key").send_keys(Keys.ENTER)
        browser.until(lambda: browser.run("return localStorage['quire.key']") == "boss")
        browser.click("#key-button")
        browser.click("#key-forget")
        assert browser.run("return localStorage['quire.key'] ?? null") is None
        assert browser.one("#key-dialog").is_displayed(), "what is shown needs one again"
        assert all("401" in error or "403" in error for error in browser.errors())
    finally:
        assert guarded.stop() == 0, (tmp_path / "log").read_text()


def test_memory_bar_parts_sum_to_total(page: Browser) -> None:
    page.until(lambda: page.one("#memory-sheet").is_displayed())
    words = page.one(".memory-bar").get_attribute("aria-label") or ""
    assert all(part in words for part in ("Weights", "KV cache", "Python and libraries", "Free"))
    assert page.text("#memory-total").endswith(" in all")
    width, parts = page.run(
        "const bar = document.querySelector('.memory-bar');"
        "return [bar.clientWidth, [...bar.children].map((each) => each.offsetWidth)]"
    )
    assert sum(parts) == pytest.approx(width, abs=3)


def test_clicked_request_shows_block_table(page: Browser, patient: Server) -> None:
    with streams(patient, 1, prompt=[7] * 64) as events:
        page.until(lambda: all(events))
        request_id = f"{events[0][0]['id']}-0"
        page.until(lambda: request_id in each(page, "#requests tbody th .name", "title"))
        page.click("#requests tbody .to-table")
        page.until(lambda: len(page.all("#table li")) >= 5)
        table = patient.get(f"/v1/engine/requests/{request_id}/blocks").json()
        block_ids = [int(text) for text in each(page, "#table li", "textContent")]
        assert block_ids[:5] == table["block_ids"][:5]
        assert each(page, "#table li", "title")[0].startswith(f"Tokens 0 to 15: block {block_ids[0]}, full, held by")
        count = len(block_ids)
        page.until(lambda: len(page.all("#table li")) > count)
    page.until(lambda: "has ended" in page.text("#table-note"))
    page.click("#table-close")
    assert not page.all("#table-sheet")[0].is_displayed()
    assert all("404" in error for error in page.errors()), "it may end after it was listed"
