"""Images on the page in a real browser, with a tiny vision model and with a text-only model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from tests.e2e.server import Server
from tests.server.images.test_requests import file_of
from tests.tiny_vision import picture, save_tiny_vision
from tests.web.browser import Browser
from tests.web.test_access import violations

pytestmark = pytest.mark.slow

LAST = "#log .message:last-child"
PASTE = """
const [id, text, name, plain] = arguments, data = new DataTransfer();
const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
data.items.add(new File([bytes], name, {type: "image/png"}));
if (plain) data.setData("text/plain", plain);
const options = {bubbles: true, cancelable: true};
const event = id === "draft" ? new ClipboardEvent("paste", {clipboardData: data, ...options})
  : new DragEvent("drop", {dataTransfer: data, ...options});
document.getElementById(id).dispatchEvent(event);
return event.defaultPrevented;
"""
"""Pastes a file into the draft, or drops it on another element."""


@pytest.fixture(scope="module")
def seeing(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_tiny_vision(tmp_path_factory.mktemp("vision"), max_position_embeddings=4096)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.2, "top_k": 7}))
    options = ("--served-model-name", "tiny", "--num-kv-blocks", "600", "--threads", "1")
    running = Server(folder / "server.log", str(folder), *options)
    yield running
    assert running.stop() == 0, running.log.read_text()


@pytest.fixture
def page(browser: Browser, seeing: Server) -> Browser:
    browser.open(f"{seeing.url}/")
    browser.until(lambda: browser.text("#model") != "")
    browser.fill("#temperature", "0")
    browser.fill("#max_tokens", "6")
    return browser


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def messages_as_curl(page: Browser) -> list[dict[str, Any]]:
    """The messages that would be sent, according to the curl command."""
    page.click("#as-curl")
    command = str(page.one("#text-body").get_property("value"))
    page.one("#text-body").send_keys(Keys.ESCAPE)
    begin, end = command.index("{"), command.rindex("}") + 1
    return list(json.loads(command[begin:end].replace("'\\''", "'"))["messages"])


def test_pasted_image_is_sent_shown_and_stored(page: Browser, seeing: Server) -> None:
    content = file_of(picture(1, 120, 80))
    assert page.run(PASTE, "draft", encoded(content), "fox.png", "")
    page.until(lambda: page.all("#attached img"))
    assert violations(page) == []
    page.fill("#draft", "What is this?" + Keys.ENTER)
    page.until(lambda: "cut at max tokens" in page.text(f"{LAST} .note"))
    assert page.one("#log .pictures img").get_attribute("alt") == "fox.png"
    assert violations(page) == []
    url = f"data:image/png;base64,{encoded(content)}"
    content_parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content_parts}], "temperature": 0, "max_tokens": 6}
    response = httpx.post(f"{seeing.url}/v1/chat/completions", json=body, timeout=60).json()
    expected_text = response["choices"][0]["message"]["content"]
    assert page.run(f"return document.querySelector('{LAST} .body').innerText").split() == expected_text.split()
    page.driver.refresh()
    page.until(lambda: page.all("#log .pictures img") and page.text("#model"))
    assert page.one("#log .pictures img").get_attribute("src") == url
    page.fill("#draft", "And its colour?")
    messages = messages_as_curl(page)
    assert messages[0]["content"] == content_parts, "it goes with each later turn"
    assert messages[-1] == {"role": "user", "content": "And its colour?"}
    page.one("#draft").send_keys(Keys.ENTER)
    page.until(lambda: len(page.all("#log .message")) == 4 and "cached" in page.text(f"{LAST} .note"))


def test_attached_image_is_downscaled_and_removable(page: Browser, tmp_path: Path) -> None:
    large, small = tmp_path / "large.jpg", tmp_path / "small.gif"
    large.write_bytes(file_of(picture(2, 4000, 1000), "JPEG"))
    small.write_bytes(file_of(picture(3, 30, 40), "GIF"))
    page.all("#attach")[0].send_keys(f"{large}\n{small}")
    page.until(lambda: len(page.all("#attached img")) == 2)
    page.click("[aria-label='Remove large.jpg']")
    assert [each.text for each in page.all("#attached li > span")] == ["small.gif"]
    page.all("#attach")[0].send_keys(str(large))
    page.until(lambda: len(page.all("#attached img")) == 2)
    page.fill("#draft", "Compare them." + Keys.ENTER)
    page.until(lambda: "cut at max tokens" in page.text(f"{LAST} .note"))
    size = "return [...document.querySelectorAll('#log .pictures img')].map((each) => [each.naturalWidth,"
    page.until(lambda: page.run(f"{size} each.naturalHeight])") == [[30, 40], [1536, 384]])
    kinds = page.run("return [...document.querySelectorAll('#log img')].map((each) => each.src.slice(0, 16))")
    assert kinds == ["data:image/webp;"] * 2


def test_too_many_images_and_invalid_image_show_errors(page: Browser, tmp_path: Path) -> None:
    content = encoded(file_of(picture(4, 30, 30)))
    for number in range(5):
        page.run(PASTE, "playground", content, f"{number}.png", "")
    page.until(lambda: page.text("#problem") == "4.png is one too many: a message may have 4 pictures.")
    assert len(page.all("#attached img")) == 4
    page.run(PASTE, "draft", encoded(b"no picture"), "bad.png", "")
    page.until(lambda: "one too many" in page.text("#problem"))
    page.click("[aria-label='Remove 0.png']")
    page.run(PASTE, "draft", encoded(b"no picture"), "bad.png", "")
    page.until(lambda: page.text("#problem") == "bad.png is no picture that this browser can read.")
    assert not page.run(PASTE, "draft", content, "cells.png", "1\t2"), "cells of a table are pasted as text"
    page.click("#clear")


def test_conversation_text_is_stored_when_images_exceed_storage(page: Browser) -> None:
    # Browsers store five million characters.
    page.run("localStorage['filler'] = 'x'.repeat(5_100_000)")
    large = encoded(file_of(picture(5, 60, 60)) + bytes(120_000))
    page.run(PASTE, "draft", large, "fox.png", "")
    page.until(lambda: page.all("#attached img"))
    page.fill("#draft", "What is this?" + Keys.ENTER)
    page.until(lambda: "cut at max tokens" in page.text(f"{LAST} .note"))
    page.until(lambda: "only their names are kept" in page.text("#problem"))
    page.driver.refresh()
    page.until(lambda: page.all(LAST) and page.text("#model"))
    assert "fox.png: the picture itself is not kept any more" in page.text("#log .message:first-child .body")
    page.fill("#draft", "And now?")
    assert messages_as_curl(page)[0]["content"] == "What is this?"


def test_exported_conversation_keeps_valid_images(browser: Browser, seeing: Server) -> None:
    browser.open(f"{seeing.url}/")
    url = f"data:image/png;base64,{encoded(file_of(picture(6, 20, 20)))}"
    script = "return module.talkFrom(args[0]).toJSON().messages[0].pictures"
    for given in ([{"name": "a", "url": url}], [{"name": "a"}]):
        assert (
            browser.module("/web/js/talks/talk.js", script, {"messages": [{"role": "user", "pictures": given}]})
            == given
        )
    for bad in ([], "x", [{}], [{"name": "a", "url": "https://example.org/a.png"}], [{"name": "a", "url": url + '"'}]):
        outcome = browser.module("/web/js/talks/talk.js", script, {"messages": [{"role": "user", "pictures": bad}]})
        assert str(outcome).startswith("failed: Error: `pictures` is a list"), bad


def test_text_only_model_rejects_images_before_sending(browser: Browser, server: Server) -> None:
    page = browser
    page.open(f"{server.url}/")
    page.until(lambda: page.text("#model") != "")
    content = encoded(file_of(picture(4, 30, 30)))
    page.run(PASTE, "draft", content, "fox.png", "")
    reason = "the model quire-demo reads no pictures."
    page.until(lambda: page.text("#problem") == f"fox.png is a picture: {reason}")
    assert not page.all("#attached img")
    url = f"data:image/png;base64,{content}"
    talk = {"id": "abcdefgh1234", "updated": 1, "system": "", "title": "Fox"}
    messages = [{"role": "user", "content": "Look.", "pictures": [{"name": "fox.png", "url": url}]}]
    stored = json.dumps(talk | {"messages": messages})
    page.run("localStorage['quire.talk.abcdefgh1234'] = arguments[0]", stored)
    page.driver.refresh()
    page.until(lambda: page.all(".talk") and page.text("#model"))
    page.click(".talk")
    page.fill("#draft", "Well?" + Keys.ENTER)
    page.until(lambda: page.text("#problem") == f"There are pictures in this conversation, and {reason}")
    assert page.one("#draft").get_property("value") == "Well?"


def test_sampling_fields_show_model_defaults_as_placeholders(page: Browser) -> None:
    script = "return arguments[0].map((each) => document.getElementById(each).placeholder)"
    names = ["temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "max_tokens", "seed"]
    assert page.run(script, names) == ["0.2", "7", "1", "1", "0", "no limit", "random"]


def test_dashboard_shows_image_positions_in_prompt(page: Browser, seeing: Server) -> None:
    page.open(f"{seeing.url}/#/engine")
    page.until(lambda: page.text("#live") == "Live")
    url = f"data:image/png;base64,{encoded(file_of(picture(1, 120, 80)))}"
    image = {"type": "image_url", "image_url": {"url": url}}
    content = [image, {"type": "text", "text": "and this"}, image]
    body = {"messages": [{"role": "user", "content": content}], "stream": True, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", f"{seeing.url}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        strip = page.one("#requests .images")
        label = str(strip.get_attribute("aria-label"))
        assert label.startswith("Images: ")
        assert len(page.all("#requests .images .image")) == 2
        page.click("#requests .name")
        page.until(lambda: "stand for images." in page.text("#explain-body"))
        page.run("document.getElementById('explain-dialog').close()")
