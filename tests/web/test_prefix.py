"""The view of cached and missed tokens of a conversation in a real browser, compared with the API."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.server import Server
from tests.web.browser import Browser

pytestmark = pytest.mark.slow


def test_explain_dialog_shows_cached_and_missed_tokens_of_each_turn(browser: Browser, server: Server) -> None:
    story = " ".join(f"The {number}th door is closed." for number in range(60))
    ids = []
    for day, more in (("Monday", ""), ("Monday", " And then?"), ("Sunday", " And then? <b>Who</b>?")):
        body = {"prompt": f"It is {day}. {story}{more}", "max_tokens": 3, "ignore_eos": True, "temperature": 0}
        ids.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["id"])
    turns = server.get(f"/v1/requests/{ids[2]}/conversation").json()["data"]
    assert [each["id"] for each in turns] == ids
    assert turns[1]["cached_tokens"] > 200
    assert turns[2]["missed"][0]["reason"] == "rewritten"
    browser.open(f"{server.url}/#/engine")
    browser.until(lambda: browser.all("#answers tbody tr:first-child .name"))
    browser.click("#answers tbody tr:first-child .name")
    browser.until(lambda: browser.one("#explain-dialog").is_displayed())
    script = "return [...document.querySelectorAll('.prefix-turns .strip')].map((each) => each.title)"
    titles = browser.driver.execute_script(script)
    assert titles == [
        f"{each['cached_tokens']:,} from the cache, {each['missed_tokens']:,} could have been cached, "
        f"{each['new_tokens']:,} new"
        for each in turns
    ]
    text = browser.text("#explain-body")
    assert f"rewritten {turns[2]['missed_tokens']:,}" in text
    assert "text before them was rewritten since" in text
    assert "Monday" in text
    assert "Sunday" in text
    browser.click("#explain-dialog [data-close]")
