"""The playground in a real browser, against what the API itself answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from tests.e2e.server import Server
from tests.web.browser import Browser

pytestmark = pytest.mark.slow

STORY = "Tell me a story about a fox."
LAST = "#log .message:last-child"


@pytest.fixture
def page(browser: Browser, server: Server) -> Browser:
    return visited(browser, server)


def visited(browser: Browser, server: Server) -> Browser:
    browser.open(f"{server.url}/")
    browser.until(lambda: browser.text("#model") != "")
    browser.fill("#temperature", "0")
    return browser


def answer(server: Server, messages: list[dict[str, str]], **fields: Any) -> str:
    body = {"messages": messages, "temperature": 0, "max_tokens": 256, **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    return str(response.json()["choices"][0]["message"]["content"])


def settled(page: Browser) -> str:
    """The last answer, once it is complete."""
    page.until(lambda: any(word in page.text(f"{LAST} .note") for word in ("finished", "cut at max tokens")))
    return said(page)


def said(page: Browser) -> str:
    """The last message's text, its paragraphs apart."""
    return str(page.run(f"return document.querySelector('{LAST} .body').innerText")).strip()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_it_shows_the_apis_answer_and_remembers_it(page: Browser, server: Server) -> None:
    page.fill("#draft", STORY + Keys.ENTER)
    first = settled(page)
    wanted = answer(server, [{"role": "user", "content": STORY}])
    assert flat(first) == flat(wanted)
    page.fill("#draft", "And then?")
    page.one("#draft").send_keys(Keys.SHIFT + Keys.ENTER)
    assert page.one("#draft").get_property("value") == "And then?\n"
    page.one("#draft").send_keys("What came next?", Keys.ENTER)
    page.until(lambda: len(page.all("#log .message")) == 4)
    history = [
        {"role": "user", "content": STORY},
        {"role": "assistant", "content": wanted},
        {"role": "user", "content": "And then?\nWhat came next?"},
    ]
    second = settled(page)
    assert flat(second) == flat(answer(server, history))
    page.driver.refresh()
    page.until(lambda: len(page.all("#log .message")) == 4)
    assert said(page) == second
    assert page.one("#temperature").get_property("value") == "0"
    page.click("#clear")
    assert page.all("#log .message") == []


def test_stop_ends_the_stream_and_the_request(browser: Browser, patient: Server) -> None:
    page = visited(browser, patient)
    page.click(".settings details details summary")
    page.fill("#extra", '{"ignore_eos": true, "max_tokens": 8000}')
    page.fill("#draft", STORY + Keys.ENTER)
    page.until(lambda: len(said(page)) > 40)
    early = said(page)
    page.until(lambda: len(said(page)) > len(early))  # it grows while it is written
    assert page.run(f"return document.querySelector('{LAST}').ariaBusy") == "true"
    page.click("#stop")
    page.until(lambda: "stopped" in page.text(f"{LAST} .note"))
    page.until(lambda: patient.metric("vllm:num_requests_running") == 0)
    kept = said(page)
    assert kept.startswith(early[:20])
    page.driver.refresh()
    page.until(lambda: page.all(LAST))
    assert said(page) == kept, "what there is stays"


def test_messages_can_be_edited_deleted_and_sent_again(page: Browser, server: Server) -> None:
    page.click("#system-fold summary")
    page.fill("#system", "You tell short tales.")
    page.fill("#draft", STORY + Keys.ENTER)
    settled(page)
    page.click("#log .message:first-child [data-action=edit]")
    field = page.one("#log .message:first-child textarea")
    field.clear()
    field.send_keys("Tell me of a king.", Keys.CONTROL + Keys.ENTER)
    page.click("#log .message:first-child [data-action=ask]")
    page.until(lambda: len(page.all("#log .message")) == 2)
    told = settled(page)
    system = {"role": "system", "content": "You tell short tales."}
    assert flat(told) == flat(answer(server, [system, {"role": "user", "content": "Tell me of a king."}]))
    page.click(f"{LAST} [data-action=delete]")
    assert len(page.all("#log .message")) == 1


def test_tokens_are_coloured_by_what_the_api_reports(page: Browser, server: Server) -> None:
    page.click("#logprobs")
    page.fill("#max_tokens", "12")
    page.fill("#draft", STORY + Keys.ENTER)
    page.until(lambda: "cut at max tokens" in page.text(f"{LAST} .note"))
    body = {"messages": [{"role": "user", "content": STORY}], "temperature": 0, "max_tokens": 12, "logprobs": True}
    reported = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "top_logprobs": 5}, timeout=60).json()
    tokens = reported["choices"][0]["logprobs"]["content"]
    spans = page.run(
        "return [...document.querySelectorAll('.token')].map((span) => [span.textContent, span.className])"
    )
    assert [text for text, _ in spans] == [token["token"] for token in tokens]
    bounds = (-0.1053605, -0.5108256, -1.2039728, -2.3025851)  # ln of 0.9, 0.6, 0.3, 0.1
    assert [name for _, name in spans] == [
        f"token likely-{sum(token['logprob'] < bound for bound in bounds)}" for token in tokens
    ]
    page.one(".tokens").send_keys(Keys.ARROW_RIGHT)
    readout = page.text("#token-readout")
    assert readout.startswith(f"“{tokens[0]['token']}”")
    assert readout.count("%") == 6


def test_a_text_is_continued_and_can_be_adopted(page: Browser, server: Server) -> None:
    page.run("document.querySelector('input[value=completion]').click()")
    page.fill("#prompt", "Once upon a time")
    page.fill("#max_tokens", "20")
    page.one("#prompt").send_keys(Keys.CONTROL + Keys.ENTER)
    page.until(lambda: "cut at max tokens" in page.text("#continued-note"))
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 20}
    wanted = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert page.text("#continued") == wanted
    page.click("#adopt")
    assert page.one("#prompt").get_property("value") == "Once upon a time" + wanted


def test_the_code_shown_repeats_the_request(page: Browser, server: Server) -> None:
    page.fill("#max_tokens", "60")
    page.fill("#top_k", "7")
    page.fill("#draft", "It's a fox's \"story\"?" + Keys.ENTER)
    page.until(lambda: "cut at" in page.text(f"{LAST} .note"))
    wanted = flat(said(page))
    page.click("#as-python")
    script = str(page.one("#text-body").get_property("value"))
    page.one("#text-body").send_keys(Keys.ESCAPE)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (flat(done.stdout), done.stderr) == (wanted, "")
    page.click("#as-curl")
    command = str(page.one("#text-body").get_property("value"))
    page.one("#text-body").send_keys(Keys.ESCAPE)
    assert '"top_k": 7' in command
    if shutil.which("curl") and os.name == "posix":
        output = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120).stdout
        assert output.endswith("data: [DONE]\n\n")
        assert output.count('"content"') > 5


def test_errors_are_shown_in_words(page: Browser) -> None:
    page.fill("#temperature", "9")
    page.fill("#draft", STORY + Keys.ENTER)
    page.until(lambda: "temperature" in page.text("#problem"))
    assert [message.get_attribute("class") for message in page.all("#log .message")] == ["message user"]
    assert all("400" in error for error in page.errors()), "the browser logs the refusal, and nothing else"
    page.click(".settings details details summary")
    page.fill("#tools", "[{")
    page.click("#send")
    page.until(lambda: page.text("#problem").startswith("Tools:"))


HOSTILE = """# <img src=x onerror=alert(1)>
<script>alert(2)</script> **<b>bold</b>** [x](javascript:alert(3)) [y](https://example.org/"onclick=alert(4))
`</code><script>` ![i](https://example.org/i.png)

```html
<iframe src="javascript:alert(5)"></iframe>
```
- one
  - two <svg onload=alert(6)>
3. three
| a | b |
|---|---|
| <i>c</i> | d |
> > deep"""


def test_markdown_is_text_whatever_it_says(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/")
    tags, links, text = browser.module(
        "/web/js/markdown.js",
        "const box = document.createElement('div'); box.append(module.markdown(args[0]));"
        "const all = [...box.querySelectorAll('*')];"
        "return [all.map((each) => each.localName), all.filter((each) => each.href).map((each) => each.protocol),"
        "box.textContent]",
        HOSTILE,
    )
    allowed = {"h3", "p", "strong", "a", "code", "pre", "ul", "ol", "li", "blockquote"}
    assert set(tags) - {"table", "thead", "tbody", "tr", "th", "td"} == allowed
    assert set(links) == {"https:"}
    for kept in (
        "<img src=x onerror=alert(1)>",
        "<script>alert(2)</script>",
        "<iframe",
        "<svg onload=alert(6)>",
        "<i>c</i>",
    ):
        assert kept in text, kept
    for source in ("", "*", "**", "`", "```", "- ", "[](", "|", "> ", "# ", "_a_b_", "\n\n\n", "*" * 2000, "[" * 2000):
        assert not str(browser.module("/web/js/markdown.js", "module.markdown(args[0])", source)).startswith("failed")
