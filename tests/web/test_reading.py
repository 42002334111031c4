"""The page shows reasoning, tool calls and JSON of a scripted engine; the embedded model writes none of these."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from selenium.webdriver.common.keys import Keys

from quire.engine.common.types import EngineCoreRequest
from tests.e2e.server import free_port
from tests.server.api import make_app
from tests.server.fake import FakeEngine
from tests.texts import CHATML
from tests.web.browser import Browser
from tests.web.test_access import overflowing, violations

pytestmark = pytest.mark.slow

EOS = 258
CALL = b"""<think>They want *weather*.</think>Let me look.
<tool_call>
{"name": "weather", "arguments": {"city": "Bern"}}
</tool_call>"""
CALL += CALL[CALL.index(b"\n<tool_call>") :].replace(b"Bern", b"Oslo")
AFTER = b"It **snows** in Bern."
WIDE = b"""|a name|memory|a column whose head says more than a phone shows|another|
|---|---|---|---|
|qwen3:0.6b|1.2 GiB|lorem ipsum dolor sit amet|x|

```python
answer = "a line of code that is longer than a phone is wide, and longer than that again, and longer than that"
```
$$a + b + c + d + e + f + g + h + i + j + k + l + m + n + o + p + q + r + s + t + u + v + w + x + y + z = 0$$
"""
FOX = b'{"name": "Reynard", "age": 7, "friends": ["Grimbert", "Isengrim"]}'
FOX_SHOWN = "name Reynardage 7friends 2 items1 Grimbert2 Isengrim"
TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'


def weather(request: EngineCoreRequest, position: int) -> int:
    """Call a tool; answer once its result is in the prompt."""
    prompt = bytes(token for token in request.prompt_ids if token < 256)
    text = AFTER if b"-3 C" in prompt else FOX if b"A fox" in prompt else WIDE if b"Wide" in prompt else CALL
    return text[position] if position < len(text) else EOS


@pytest.fixture
def url(chromium: Browser) -> Iterator[str]:
    engine = FakeEngine(weather, eos=[EOS], max_model_len=400_000)
    template = CHATML + "{# tools: <tool_call> <think> #}"
    app = make_app(engine, chat_template=template, tool_call_parser="hermes", reasoning_parser="think")
    port = free_port()
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    app.state.server.models.loaded_runtimes[0].live_view.close_streams()
    running.should_exit = True
    thread.join(30)


def test_reasoning_and_tool_calls_are_shown_and_results_sent(browser: Browser, url: str) -> None:
    browser.open(f"{url}/")
    browser.click("#tools-fold summary")
    browser.fill("#tools", TOOLS)
    assert browser.text("#tools-said") == "The model may call weather."
    browser.fill("#max_tokens", "400")
    browser.fill("#draft", "How is the weather in Bern and in Oslo?" + Keys.ENTER)
    browser.until(lambda: len(browser.all(".tool-result textarea")) == 2)
    assert browser.text(".reasoning p") == "They want *weather*."
    assert browser.text(".reasoning summary").startswith("Thought for ")
    assert browser.run("return document.querySelector('.reasoning').open") is False, "its time is over"
    assert browser.text(".prose p").strip() == "Let me look."
    assert browser.text(".tool-name code") == "weather"
    assert browser.run("return document.querySelector('.tool-arguments').innerText") == "city Bern"
    for tool_result in ('{"sky": "snow"}', "-3 C, rain"):
        browser.one(".tool-result textarea").send_keys(tool_result, Keys.CONTROL + Keys.ENTER)
    browser.until(lambda: len(browser.all("#log .message")) == 5 and browser.all("#log .message:last-child strong"))
    browser.until(lambda: browser.text("#log .message:last-child .prose") == "It snows in Bern.")
    assert browser.text("#log .message:nth-child(3) .json-text") == "snow"
    assert not browser.all(".tool-result")
    browser.driver.refresh()
    browser.until(lambda: len(browser.all("#log .message")) == 5)
    assert not browser.all(".tool-result"), "which calls have results is known of a stored talk, too"


def test_tool_result_request_has_api_message_form(browser: Browser, url: str) -> None:
    """The request after a tool call, as shown by the curl command."""
    browser.open(f"{url}/")
    browser.click("#tools-fold summary")
    browser.fill("#tools", TOOLS)
    browser.fill("#draft", "Weather?" + Keys.ENTER)
    browser.until(lambda: len(browser.all(".tool-result textarea")) == 2)
    for _ in range(2):
        browser.one(".tool-result button").click()
    browser.click("#as-curl")
    body = str(browser.one("#text-body").get_property("value"))
    sent = json.loads(body[body.index("{") : body.rindex("'")].replace("'\\''", "'"))
    browser.click("#text-dialog [data-close]")
    user_message, assistant_message, *tool_messages = sent["messages"][:4]
    assert [each["role"] for each in (user_message, assistant_message, *tool_messages)] == [
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    assert [each["tool_call_id"] for each in tool_messages] == [each["id"] for each in assistant_message["tool_calls"]]
    assert all(each.keys() == {"role", "content", "tool_call_id"} for each in tool_messages)
    assert "reasoning" not in assistant_message


def test_json_answer_is_shown_as_tree_and_raw_text(browser: Browser, url: str) -> None:
    browser.open(f"{url}/")
    assert not browser.one("#json").is_selected()
    browser.click("#json")
    browser.fill("#schema", '{"type": "objekt"}')
    assert "there is no type" in browser.text("#schema-said")
    assert browser.one("#schema").get_attribute("aria-invalid") == "true"
    browser.fill("#draft", "A fox in the form of a tree" + Keys.ENTER)
    browser.until(lambda: browser.text("#problem").startswith("JSON schema: "))
    assert browser.all("#log .message") == [], "nothing was asked"
    browser.one("#schema").send_keys(Keys.CONTROL + "a", Keys.DELETE)
    browser.click("#schema-example")
    assert browser.text("#schema-said") == "Fits: an object with name, age, friends."
    browser.click("#send")
    browser.until(lambda: browser.all(".json .tree"))
    num_json_elements = browser.run(
        "return [...document.querySelectorAll('.json .json-name, .json [class^=json-]')].length"
    )
    assert num_json_elements > 6
    assert browser.text(".json .tree") == FOX_SHOWN
    assert browser.text(".json .raw code") == FOX.decode()
    browser.click("#as-curl")
    body = str(browser.one("#text-body").get_property("value"))
    sent = json.loads(body[body.index("{") : body.rindex("'")].replace("'\\''", "'"))
    assert sent["response_format"]["type"] == "json_schema"
    assert sent["response_format"]["json_schema"]["schema"]["required"] == ["name", "age", "friends"]
    browser.click("#text-dialog [data-close]")


def test_wide_answer_does_not_overflow_phone_width(browser: Browser, url: str) -> None:
    browser.open(f"{url}/", 390, 844)
    browser.fill("#draft", "Wide" + Keys.ENTER)
    browser.until(lambda: browser.all(".prose table") and browser.all(".prose math") and browser.one("#send"))
    assert overflowing(browser, 390) == []
    lines = (
        "const range = document.createRange(); range.selectNodeContents(document.querySelector('.prose td'));"
        "return range.getClientRects().length"
    )
    assert browser.run(lines) == 1, "a cell breaks no word"
    assert violations(browser) == []


HUGE = "[" * 60 + "]" * 60


def test_json_tree_is_drawn_for_objects_and_lists_only(browser: Browser, url: str) -> None:
    browser.open(f"{url}/")
    is_tree = "return module.jsonOf(args[0]) !== null"
    path = "/web/js/message/tree.js"
    for text in ('{"a": 1}', " [1, 2]", "{}"):
        assert browser.module(path, is_tree, text) is True
    for text in ("[link](https://example.org)", "{", "7", '"text"', HUGE, json.dumps([0] * 5000)):
        assert browser.module(path, is_tree, text) is False, text
    hostile = '{"<img src=x onerror=alert(1)>": "<b>x</b>", "__proto__": {"a": null}}'
    script = "const block = module.jsonBlock(module.jsonOf(args[0]), args[0]);"
    drawn = browser.module(
        path, script + "return [block.textContent, block.querySelectorAll('img, b').length]", hostile
    )
    assert drawn[1] == 0
    assert "<b>x</b>" in drawn[0]
    assert "__proto__" in drawn[0]


def test_new_answer_does_not_redraw_long_conversation(browser: Browser, url: str) -> None:
    browser.open(f"{url}/")
    browser.run(
        "const messages = []; for (let i = 0; i < 1000; i++) messages.push({role: 'user', content: 'Question ' + i},"
        "{role: 'assistant', content: '# Answer ' + i + '\\n\\n- `one`\\n- **two**'});"
        "localStorage['quire.talk.long'] = JSON.stringify({id: 'long', updated: 1, system: '', messages});"
        "sessionStorage['quire.shown'] = 'long'"
    )
    browser.driver.refresh()
    browser.until(lambda: len(browser.all("#log .message:nth-child(2000)")) == 1)
    browser.run(
        "for (const each of document.querySelectorAll('.message')) each.seen = each.querySelector('.prose, .plain')"
    )
    browser.fill("#draft", "And now?" + Keys.ENTER)
    browser.until(lambda: "tokens" in browser.text("#log .message:last-child .note"))
    again = (
        "return [...document.querySelectorAll('.message')].filter((each) => each.seen?.isConnected === false).length"
    )
    assert browser.run(again) == 1, "of the last one alone, whose buttons change"
    bottom = "return Math.abs(innerHeight + scrollY - document.documentElement.scrollHeight)"
    browser.until(lambda: browser.run(bottom) < 2)
